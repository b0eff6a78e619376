"""The files for deploying: Ray's own validation takes them, and they agree with each other."""

from __future__ import annotations

import json
import re
from importlib.metadata import version
from pathlib import Path
from typing import Any

import pytest
import yaml
from ray.autoscaler._private.util import prepare_config, validate_config

from pd_cluster.config import load_config
from pd_cluster.config import validate_config as validate_settings

ROOT = Path(__file__).parents[1]
CLOUD = ROOT / "ray_cluster.yaml"
ON_PREMISE = ROOT / "configs" / "ray" / "on-premise.yaml"
SERVE = ROOT / "configs" / "ray" / "serve.yaml"
ROLES = ("prefill", "decode")


def read(path: Path) -> dict[str, Any]:
    data: dict[str, Any] = yaml.safe_load(path.read_text())
    return data


def manifests() -> dict[str, dict[str, Any]]:
    documents = yaml.safe_load_all((ROOT / "configs" / "ray" / "kuberay.yaml").read_text())
    return {document["kind"]: document for document in documents}


@pytest.mark.parametrize("path", [CLOUD, ON_PREMISE], ids=lambda path: path.name)
def test_ray_accepts_the_file(path: Path) -> None:
    validate_config(prepare_config(read(path)))


@pytest.mark.parametrize("path", [CLOUD, ON_PREMISE], ids=lambda path: path.name)
def test_nodes_get_the_project_the_token_and_their_environment(path: Path) -> None:
    config = read(path)
    assert config["file_mounts"] == {"~/pd-cluster": ".", "~/.ray/auth_token": "~/.ray/auth_token"}
    assert {".git", ".venv"} <= set(config["rsync_exclude"])
    setup = "\n".join(config["setup_commands"])
    assert ". ~/pd-cluster/configs/ray/env.sh" in setup
    assert "pip install" in setup
    assert "pd-cluster model pull" in setup
    for commands in (config["head_start_ray_commands"], config["worker_start_ray_commands"]):
        assert "#" not in "".join(commands), "a comment would end the command"
        assert "--metrics-export-port=8080" in commands[-1]
    assert "RAY_AUTH_MODE=token" in (ROOT / "configs" / "ray" / "env.sh").read_text()


def test_the_cloud_has_a_head_without_gpu_and_a_node_type_for_each_role() -> None:
    config = read(CLOUD)
    types = config["available_node_types"]
    assert set(types) == {"head", *ROLES}
    assert types["head"]["max_workers"] == 0
    assert "--num-gpus=0" in config["head_start_ray_commands"][-1]
    for role in ROLES:
        resources = types[role]["resources"]
        assert {"CPU", "GPU", role} == set(resources)
        assert resources[role] == resources["GPU"], "one worker a GPU"
        assert 1 <= types[role]["min_workers"] <= types[role]["max_workers"]
    assert sum(types[role]["max_workers"] for role in ROLES) == config["max_workers"]


def test_own_hosts_are_one_for_each_role() -> None:
    config = read(ON_PREMISE)
    head, worker = (config[f"{each}_start_ray_commands"][-1] for each in ("head", "worker"))
    given = [
        json.loads(found[1])
        for command in (head, worker)
        if (found := re.search(r"--resources='(.*?)'", command))
    ]
    assert [set(each) for each in given] == [{"prefill"}, {"decode"}]
    assert f"--node-ip-address={config['provider']['head_ip']}" in head
    assert config["min_workers"] == config["max_workers"] == len(config["provider"]["worker_ips"])


def test_workers_take_what_nodes_have() -> None:
    settings = load_config(SERVE)
    assert settings.resources.prefill == {"prefill": 1}
    assert settings.resources.decode == {"decode": 1}


def test_kubernetes_has_the_same_nodes() -> None:
    documents = manifests()
    spec = documents["RayCluster"]["spec"]
    assert spec["rayVersion"] == version("ray")
    assert spec["authOptions"] == {"mode": "token"}
    groups = {group["groupName"]: group for group in spec["workerGroupSpecs"]}
    assert set(groups) == set(ROLES)
    settings = validate_settings(yaml.safe_load(documents["ConfigMap"]["data"]["serve.yaml"]))
    types = read(CLOUD)["available_node_types"]
    head = spec["headGroupSpec"]["template"]["spec"]["containers"][0]
    for role in ROLES:
        group = groups[role]
        container = group["template"]["spec"]["containers"][0]
        # In a string for the shell, as the operator wants it.
        offered = json.loads(json.loads(group["rayStartParams"]["resources"]))
        gpus = int(container["resources"]["limits"]["nvidia.com/gpu"])
        assert offered == {role: gpus}
        assert getattr(settings.resources, role) == {role: 1, "num_gpus": 1}
        assert group["minReplicas"] <= group["replicas"] <= group["maxReplicas"]
        assert group["maxReplicas"] == types[role]["max_workers"]
        assert container["image"] == head["image"]
    assert "nvidia.com/gpu" not in head["resources"]["limits"]
    assert spec["headGroupSpec"]["rayStartParams"]["num-gpus"] == "0"


def test_kubernetes_leads_clients_to_the_gateway() -> None:
    documents = manifests()
    cluster, service = documents["RayCluster"], documents["Service"]
    settings = validate_settings(yaml.safe_load(documents["ConfigMap"]["data"]["serve.yaml"]))
    pod = cluster["spec"]["headGroupSpec"]["template"]["spec"]
    ports = {each["name"]: each["containerPort"] for each in pod["containers"][0]["ports"]}
    reached = {ports[each["targetPort"]] for each in service["spec"]["ports"]}
    assert reached == {settings.port, settings.metrics_port}
    assert service["spec"]["selector"] == {
        "ray.io/cluster": cluster["metadata"]["name"],
        "ray.io/node-type": "head",
    }
    volumes = {each["name"]: each for each in pod["volumes"]}
    assert volumes["serve"]["configMap"]["name"] == documents["ConfigMap"]["metadata"]["name"]
    assert {each["name"] for each in pod["containers"][0]["volumeMounts"]} == set(volumes)


def test_the_image_has_the_pinned_versions_and_no_root() -> None:
    text = (ROOT / "Dockerfile").read_text()
    assert re.search(r"^FROM nvidia/cuda:.*ubuntu24\.04$", text, re.MULTILINE), "Python 3.12"
    assert re.findall(r"^USER (.*)$", text, re.MULTILINE) == ["pd"]
    assert "pip install --no-cache-dir -c pd-cluster/constraints.txt" in text
    assert f"ray=={version('ray')}" in (ROOT / "constraints.txt").read_text().splitlines()


def test_every_line_that_must_be_changed_is_marked() -> None:
    """Addresses, images, users and keys that are nobody's."""
    placeholders = r"10\.0\.0\.|ami-\d|203\.0\.113|us-east|registry\.example|ssh_user|id_ed"
    unmarked = [
        f"{path.name}: {line}"
        for path in (CLOUD, ON_PREMISE, ROOT / "configs" / "ray" / "kuberay.yaml")
        for line in path.read_text().splitlines()
        # A command can have no comment: it stands above.
        if re.search(placeholders, line) and "CHANGE" not in line and "ray start" not in line
    ]
    assert unmarked == []
