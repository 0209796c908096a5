"""Answers of other servers through the gateway, field by field beside their own."""
