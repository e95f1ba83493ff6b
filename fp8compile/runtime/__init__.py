"""While a model trains: scaling state, cold and warm calls, overflows, phases, probes."""
