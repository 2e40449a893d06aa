"""The Grafana dashboard and what builds it."""
