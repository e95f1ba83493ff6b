"""While it trains: scaling state, cold and warm calls, overflows, phases, probes."""
