"""Training loops of other libraries, some on two processes with gloo. Skipped where one is not installed:
`make hosts`."""
