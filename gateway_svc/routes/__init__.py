"""The routes of the API, and what they share: a body becomes a run, and its deltas an answer.

Asks for work through `gateway_svc.backend` alone, and knows no peer.
"""
