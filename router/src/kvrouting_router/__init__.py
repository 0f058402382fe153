"""The pool's front door: each request goes to the worker that will end it first."""
