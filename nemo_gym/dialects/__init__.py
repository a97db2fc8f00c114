"""The languages model endpoints speak beside the Responses API, and the way there and back."""
