"""One engine's companion: mirrors its radix tree and streams it to the routers."""
