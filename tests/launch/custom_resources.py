"""The documented fields of the custom resources in launch/, because no validator on PyPI contains their schemas."""

from typing import Any

# The fields of an object by name. The value describes the field: its own fields (a dict), the fields of each entry of a
# list (a list with one dict), the allowed values (a set), or None for a field that this table does not check further.
Fields = dict[str, Any]

# Kubernetes validates metadata and Job templates. test_core_resources_match_the_schema does so here.
_OBJECT: Fields = {"apiVersion": None, "kind": None, "metadata": None}

# api/jobset/v1alpha2/jobset_types.go of kubernetes-sigs/jobset, commit 0336a8fd
JOB_SET: Fields = _OBJECT | {
    "apiVersion": {"jobset.x-k8s.io/v1alpha2"},
    "kind": {"JobSet"},
    "spec": {
        "replicatedJobs": [
            {
                "name": None,
                "groupName": None,
                "template": {"metadata": None, "spec": None},
                "replicas": None,
                "dependsOn": [{"name": None, "status": {"Ready", "Complete"}}],
            }
        ],
        "network": {"enableDNSHostnames": None, "subdomain": None, "publishNotReadyAddresses": None},
        "successPolicy": {"operator": {"All", "Any"}, "targetReplicatedJobs": None},
        "failurePolicy": {
            "maxRestarts": None,
            "restartStrategy": {"Recreate", "BlockingRecreate", "InPlaceRestart"},
            "rules": None,
        },
        "suspend": None,
        "coordinator": {"replicatedJob": None, "jobIndex": None, "podIndex": None},
        "managedBy": None,
        "ttlSecondsAfterFinished": None,
        "volumeClaimPolicies": None,
    },
}

# pytorch_types.go (commit 2f18ab7a) and common_types.go (commit 186ac6c6) in pkg/apis/kubeflow.org/v1 of
# kubeflow/training-operator
PYTORCH_JOB: Fields = _OBJECT | {
    "apiVersion": {"kubeflow.org/v1"},
    "kind": {"PyTorchJob"},
    "spec": {
        "runPolicy": None,
        "elasticPolicy": {
            "minReplicas": None,
            "maxReplicas": None,
            "rdzvBackend": {"c10d", "etcd", "etcd-v2"},
            "rdzvPort": None,
            "rdzvHost": None,
            "rdzvId": None,
            "rdzvConf": [{"key": None, "value": None}],
            "standalone": None,
            "maxRestarts": None,
            "metrics": None,
        },
        "pytorchReplicaSpecs": {
            kind: {
                "replicas": None,
                "template": {"metadata": None, "spec": None},
                "restartPolicy": {"Always", "OnFailure", "Never", "ExitCode"},
            }
            for kind in ("Master", "Worker")
        },
        "nprocPerNode": None,
    },
}

# docs/source/reference/yaml-spec.rst of skypilot-org/skypilot: https://docs.skypilot.co/en/latest/reference/yaml-spec.html
SKY_TASK: Fields = {
    "name": None,
    "workdir": None,
    "num_nodes": None,
    "resources": {
        name: None
        for name in (
            *("infra", "accelerators", "accelerator_args", "cpus", "memory", "instance_type", "use_spot", "disk_size"),
            *("disk_tier", "network_tier", "image_id", "ports", "labels", "autostop", "any_of", "ordered"),
            "job_recovery",
        )
    },
    "envs": None,
    "secrets": None,
    "volumes": None,
    "file_mounts": None,
    "setup": None,
    "run": None,
    "config": {"kubernetes": {"pod_config": None}},
}


def unknown_fields(value: Any, fields: Any, path: str = "") -> list[str]:
    """Return the paths in `value` that `fields` does not describe."""
    if isinstance(fields, set):
        return [] if value in fields else [path]
    if isinstance(fields, list):
        return [
            name for index, entry in enumerate(value) for name in unknown_fields(entry, fields[0], f"{path}[{index}]")
        ]
    if isinstance(fields, dict):
        found = []
        for name, entry in value.items():
            here = f"{path}.{name}" if path else str(name)
            found += unknown_fields(entry, fields[name], here) if name in fields else [here]
        return found
    return []
