"""Engines that sample from the policy: one protocol, an HTTP client for SGLang servers, a scripted one for tests."""
