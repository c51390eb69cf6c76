"""External block stores: what a connector offers, how one is loaded, and an example."""
