"""Where the learner computes: one file a backend."""
