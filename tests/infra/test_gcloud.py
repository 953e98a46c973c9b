"""infra/gcp/setup.sh, against a gcloud that writes down what it is told and knows what it has made."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

import pytest

GCP = Path(__file__).parents[2] / "infra" / "gcp"
SETUP = GCP / "setup.sh"
EMAIL = "bucketfeed@photo-project.iam.gserviceaccount.com"

_GCLOUD = """#!{python}
import json, os, pathlib, sys
state = pathlib.Path({state!r})
words = [w for w in sys.argv[1:] if not w.startswith("--")]
with (state / "calls").open("a") as f:
    f.write(json.dumps(sys.argv[1:]) + "\\n")
made = state / "-".join(words).replace("/", "_").replace("describe-", "").replace("create-", "").split("@")[0]
fails = state / "fails"
if "describe" in words and not made.exists():
    sys.exit("NOT_FOUND")
if "create" in words:
    if made.exists():
        sys.exit("ALREADY_EXISTS")
    made.touch()
if "add-iam-policy-binding" in words and fails.exists() and (left := int(fails.read_text())):
    fails.write_text(str(left - 1))
    sys.exit("INVALID_ARGUMENT: Service account does not exist.")
"""


@dataclass(frozen=True)
class Gcloud:
    """The stand-in, and what it was told."""

    folder: Path

    def run(self, **environment: str) -> subprocess.CompletedProcess[str]:
        """Run setup.sh with it."""
        plain = {"PATH": f"{self.folder / 'bin'}:{os.environ['PATH']}", "RETRY_SECONDS": "0", **environment}
        return subprocess.run([str(SETUP)], env=plain, capture_output=True, text=True, timeout=60)

    def set_up(self, **environment: str) -> str:
        """Run it with project and bucket, to its end; return what it says."""
        done = self.run(PROJECT="photo-project", BUCKET="photos", **environment)
        assert done.returncode == 0, done.stderr
        return done.stdout

    def calls(self) -> list[list[str]]:
        """Every call since this was asked last."""
        path = self.folder / "calls"
        found = [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()] if path.exists() else []
        path.unlink(missing_ok=True)
        return found


@pytest.fixture
def gcloud(tmp_path: Path) -> Gcloud:
    stub = tmp_path / "bin" / "gcloud"
    stub.parent.mkdir()
    stub.write_text(_GCLOUD.format(python=sys.executable, state=str(tmp_path)), encoding="utf-8")
    stub.chmod(0o755)
    return Gcloud(tmp_path)


def option(call: list[str], name: str) -> str | None:
    return next((word.partition("=")[2] for word in call if word.startswith(f"--{name}=")), None)


def bindings(calls: list[list[str]], on: str) -> dict[str, tuple[str | None, str | None]]:
    """Role: member and condition, of all bindings on a `buckets` or `service-accounts` resource."""
    return {
        str(option(call, "role")): (option(call, "member"), option(call, "condition"))
        for call in calls
        if "add-iam-policy-binding" in call and on in call
    }


def verbs(calls: list[list[str]]) -> list[str]:
    return [" ".join(w for w in call if not w.startswith("--")) for call in calls]


class TestSetup:
    def test_is_a_script_that_bash_can_read(self) -> None:
        assert subprocess.run(["bash", "-n", str(SETUP)], timeout=10).returncode == 0
        assert os.access(SETUP, os.X_OK)

    def test_makes_a_private_bucket_where_it_was_asked_to(self, gcloud: Gcloud) -> None:
        gcloud.set_up(LOCATION="europe-west4")
        (create,) = [call for call in gcloud.calls() if "buckets" in call and "create" in call]
        assert "gs://photos" in create
        assert option(create, "location") == "europe-west4"
        assert {"--uniform-bucket-level-access", "--public-access-prevention"} <= set(create)

    def test_names_the_project_in_every_call_and_never_waits_for_an_answer(self, gcloud: Gcloud) -> None:
        gcloud.set_up(KUBERNETES="ray/worker", MEMBER="user:anna@example.com")
        calls = gcloud.calls()
        assert calls
        assert [call for call in calls if not {"--project=photo-project", "--quiet"} <= set(call)] == []

    def test_lets_the_account_read_all_write_outputs_and_prune_checkpoints(self, gcloud: Gcloud) -> None:
        gcloud.set_up()
        account = f"serviceAccount:{EMAIL}"
        name = 'expression=resource.name.startsWith("projects/_/buckets/photos/objects/'
        assert bindings(gcloud.calls(), "buckets") == {
            "roles/storage.objectViewer": (account, "None"),
            "roles/storage.objectCreator": (account, f'^|^title=outputs|{name}outputs/")'),
            "roles/storage.objectUser": (account, f'^|^title=checkpoints|{name}checkpoints/")'),
        }

    def test_gives_no_role_of_the_project_and_makes_no_key(self, gcloud: Gcloud) -> None:
        gcloud.set_up(KUBERNETES="ray/worker", MEMBER="user:anna@example.com")
        found = verbs(gcloud.calls())
        assert [call for call in found if call.startswith("projects") or " keys " in call] == []

    def test_lets_nobody_act_as_the_account_unless_asked(self, gcloud: Gcloud) -> None:
        gcloud.set_up()
        assert bindings(gcloud.calls(), "service-accounts") == {}

    def test_lets_pods_of_one_kubernetes_account_act_as_it_and_says_the_other_half(self, gcloud: Gcloud) -> None:
        said = gcloud.set_up(KUBERNETES="ray/worker")
        pods = "serviceAccount:photo-project.svc.id.goog[ray/worker]"
        assert bindings(gcloud.calls(), "service-accounts") == {"roles/iam.workloadIdentityUser": (pods, "None")}
        assert f"serviceaccount -n ray worker iam.gke.io/gcp-service-account={EMAIL}" in said

    def test_lets_a_person_act_as_it_without_a_key_file(self, gcloud: Gcloud) -> None:
        said = gcloud.set_up(MEMBER="user:anna@example.com")
        expected = {"roles/iam.serviceAccountTokenCreator": ("user:anna@example.com", "None")}
        assert bindings(gcloud.calls(), "service-accounts") == expected
        assert f"--impersonate-service-account={EMAIL}" in said

    def test_run_again_makes_nothing_new_and_sets_the_same(self, gcloud: Gcloud) -> None:
        first_said, first = gcloud.set_up(), gcloud.calls()
        second_said, second = gcloud.set_up(), gcloud.calls()
        assert second == [call for call in first if "create" not in call]
        assert [call for call in verbs(first) if call not in verbs(second)] == [
            "storage buckets create gs://photos",
            "iam service-accounts create bucketfeed",
        ]
        assert second_said == first_said

    def test_tries_again_while_the_new_account_is_not_known_everywhere(self, gcloud: Gcloud) -> None:
        (gcloud.folder / "fails").write_text("3", encoding="utf-8")
        gcloud.set_up()
        tries = [call for call in gcloud.calls() if option(call, "role") == "roles/storage.objectViewer"]
        assert len(tries) == 4

    def test_ends_where_gcloud_goes_on_failing(self, gcloud: Gcloud) -> None:
        (gcloud.folder / "fails").write_text("99", encoding="utf-8")
        done = gcloud.run(PROJECT="photo-project", BUCKET="photos")
        assert done.returncode == 1
        assert "failed 6 times" in done.stderr
        assert "does not exist" in done.stderr
        assert len(bindings(gcloud.calls(), "buckets")) == 1

    @pytest.mark.parametrize(
        ("environment", "said"),
        [
            ({"BUCKET": "photos"}, "PROJECT"),
            ({"PROJECT": "photo-project"}, "BUCKET"),
            ({"PROJECT": "photo-project", "BUCKET": "photos", "KUBERNETES": "worker"}, "is not namespace/name"),
        ],
    )
    def test_says_what_lacks_before_it_calls_anyone(
        self, gcloud: Gcloud, environment: dict[str, str], said: str
    ) -> None:
        done = gcloud.run(**environment)
        assert done.returncode != 0
        assert said in done.stderr
        assert gcloud.calls() == []


class TestLifecycle:
    def test_forgets_broken_uploads_and_the_inputs_of_old_jobs_and_nothing_else(self, gcloud: Gcloud) -> None:
        gcloud.set_up()
        (update,) = [call for call in gcloud.calls() if "update" in call]
        rules = json.loads(Path(str(option(update, "lifecycle-file"))).read_text(encoding="utf-8"))["rule"]
        assert rules == [
            {"action": {"type": "AbortIncompleteMultipartUpload"}, "condition": {"age": 3}},
            {"action": {"type": "Delete"}, "condition": {"age": 30, "matchesPrefix": ["jobs/"]}},
        ]
