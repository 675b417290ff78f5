"""OpenAI's HTTP interface on the gateway's core: JSON bodies → the contract's messages, chunks → JSON and events."""
