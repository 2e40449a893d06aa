"""How processes reach each other: the contract (`base`), ZeroMQ (`zmq`) and its in-memory twin (`memory`)."""
