"""The steps of translating between the Responses and the Chat Completions API; `responses_converter` tells the story."""
