"""What the chart renders, by kind and by part."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import yaml
from tests.helm.values import Values

Object = dict[str, Any]


@dataclass(frozen=True)
class Rendered:
    """What one set of values gives."""

    objects: list[Object]
    notes: str

    @classmethod
    def of_files(cls, files: dict[str, str]) -> Rendered:
        """From the text of each template."""
        texts = {name: text for name, text in files.items() if not name.endswith("NOTES.txt")}
        documents = [item for text in texts.values() for item in yaml.load_all(text, yaml.CSafeLoader) if item]
        return cls(documents, files.get("ottserve/templates/NOTES.txt", ""))

    def one(self, kind: str, suffix: str = "") -> Object:
        """The only object of a kind; where there are more, `suffix` tells them apart."""
        named = [item for item in self.of(kind) if item["metadata"]["name"].endswith(("-dashboard", "-headless"))]
        found = [item for item in self.of(kind) if item not in named]
        if suffix:
            found = [item for item in named if item["metadata"]["name"].endswith(suffix)]
        assert len(found) == 1, f"{kind} {suffix}: {[item['metadata']['name'] for item in found]}"
        return found[0]

    def of(self, kind: str) -> list[Object]:
        """All objects of a kind."""
        return [item for item in self.objects if item["kind"] == kind]

    def pods(self) -> dict[str, Object]:
        """Pod specs of the service by component."""
        templates = [item["spec"]["template"] for item in self.of("Deployment")]
        for service in self.of("RayService"):
            cluster = service["spec"]["rayClusterConfig"]
            templates += [group["template"] for group in (cluster["headGroupSpec"], *cluster["workerGroupSpecs"])]
        return {t["metadata"]["labels"]["app.kubernetes.io/component"]: t["spec"] for t in templates}

    def settings(self) -> Values:
        """The settings file."""
        found: Values = yaml.safe_load(self.one("ConfigMap")["data"]["settings.yaml"])
        return found
