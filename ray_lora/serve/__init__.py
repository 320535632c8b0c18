"""HTTP and handles -> requests: the OpenAI API and the deployments of Ray Serve."""
