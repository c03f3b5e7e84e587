"""The engines, one package per engine. No engine imports another."""
