"""Answers in a required form: grammars and schemas for what an answer or a tool call may be."""
