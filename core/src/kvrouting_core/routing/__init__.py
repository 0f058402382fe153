"""Which worker a request goes to: state machines without I/O, events in, actions out."""
