"""The gate: a pure state machine. It knows neither store, HTTP, nor asyncio."""
