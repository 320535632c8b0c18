"""What can be known about the manifests without a cluster.

    python -m k8s.checks                       every overlay
    python -m k8s.checks path/to/my/overlay    yours

Needs `kubectl` and `kubernetes-validate` of `make test-k8s`, and the CRDs of KubeRay and prometheus-operator.
"""
