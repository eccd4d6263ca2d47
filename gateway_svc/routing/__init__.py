"""Encoders and decoders: who is there, which of them does what, and the story of each request among them.

Implements `gateway_svc.backend`; knows nothing of HTTP or text.
"""
