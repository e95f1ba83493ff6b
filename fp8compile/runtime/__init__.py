"""While a model trains: scaling state, cold and warm calls, notices, phases, probes."""
