"""Devices, the rendezvous store, run locks, process exit, and messages between ranks and their supervisor."""
