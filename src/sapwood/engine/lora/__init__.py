"""Adapters: read by a process of their own, put into slots, added in layers."""
