"""Training loops of other libraries, on two processes with gloo. Skipped where a library is not installed: `make hosts`."""
