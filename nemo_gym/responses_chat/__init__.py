"""The steps of translating between the Responses and the Chat Completions API; see `responses_converter`."""
