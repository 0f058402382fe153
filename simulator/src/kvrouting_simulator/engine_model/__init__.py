"""One engine without a GPU: SGLang's scheduler, a radix cache and a time model, stepped on a clock that is passed in."""
