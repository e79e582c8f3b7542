"""What every API of the gateway is built on."""
