"""From HTTP or a handle to a `Request` and back: tokens, OpenAI's types, Ray Serve's deployments."""
