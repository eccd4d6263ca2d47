"""Media of requests: from a URL to bytes, key and grid, and the bytes' keep until an encoder has them.

Knows no other room; what only an encoder can tell of a video is asked through `gateway_svc.backend`.
"""
