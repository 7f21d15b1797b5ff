"""Engines that sample from the policy: the protocol, an HTTP client for SGLang servers and a scripted test engine."""
