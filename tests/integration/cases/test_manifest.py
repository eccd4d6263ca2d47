"""Every case of the manifest is run: by its requests, by a test that names it, by one listed here, or not yet."""

import re
from pathlib import Path

import pytest

from tests.integration.cases.manifest import all_cases, plain_cases
from tests.paths import REPOSITORY, needs_shared

# Cases without requests, whose tests look inside a service.
TESTED_INSIDE = {
    "DIS-02": "tests/decoder_svc/test_embedding_fetch.py"
    "::test_an_encoder_that_dies_in_mid_payload_fails_the_fetch_at_once",
    "DIS-07": "tests/decoder_svc/test_engine.py::test_tokens_are_the_same_when_embeddings_come_late_and_blocks_run_out",
    "DIS-08": "tests/encoder_svc/test_server.py::test_leases_of_a_gateway_that_died_end_by_themselves",
    "DIS-12": "tests/common/test_embedding.py::test_every_difference_is_refused_by_name",
    "DIS-13": "tests/common/test_wire.py::test_another_major_version_is_refused_with_both_versions_named",
    "DIS-16": "tests/common/test_transport.py::test_nothing_is_queued_for_a_service_that_is_not_there",
    "K8S-01": "tests/common/test_service.py::test_health_answers_while_the_service_loads_and_ready_says_no",
    "K8S-04": "tests/deploy/helm/test_images.py::test_the_first_process_is_the_service_and_not_a_shell",
    "K8S-08": "tests/kubernetes/test_membership.py"
    "::test_an_encoder_that_restarts_at_another_address_behind_its_name_is_used_again_within_10_s",
    "K8S-10": "tests/deploy/helm/test_chart.py::test_scaling_down_is_slow_and_scaling_up_is_not",
    "K8S-12": "tests/deploy/helm/test_chart.py::test_the_grace_period_is_longer_than_the_sleep_and_the_drain",
    "K8S-14": "tests/deploy/helm/test_chart.py::test_a_busy_pod_is_not_restarted_and_a_slow_start_is_waited_for",
    "MTH-01": "tests/common/test_vision_grid.py",
    "MTH-02": "tests/decoder_svc/test_positions.py",
    "MTH-03": "tests/decoder_svc/test_positions.py",
    "MTH-04": "tests/decoder_svc/test_positions.py",
    "MTH-06": "tests/common/test_vision_grid.py",
    "MTH-07": "tests/encoder_svc/model/test_position.py",
    "MTH-09": "tests/decoder_svc/model/test_text.py::test_zeroed_deepstack_level_first_changes_what_follows_its_layer",
    "MTH-10": "tests/decoder_svc/test_engine.py::test_the_size_of_prefill_chunks_changes_no_token",
    "MTH-12": "tests/decoder_svc/model/test_weights.py::test_untied_model_keeps_its_own_lm_head",
    "SEC-09": "tests/common/test_transport.py::test_an_endpoint_that_strangers_reach_needs_keys",
    "SEC-16": "tests/gateway_svc/http/test_access.py::test_every_route_that_is_documented_needs_a_key",
    "TXT-17": "tests/gateway_svc/text/test_detokenizer.py",
}
NOT_YET: dict[str, str] = {}


@needs_shared
def test_every_case_of_the_manifest_has_its_place() -> None:
    texts = [path.read_text() for path in Path(__file__).parent.glob("test_*_cases.py")]
    named = {word for text in texts for word in re.findall(r"\b[A-Z0-9]{3}-\d\d\b", text)}
    groups = {group for text in texts for call in re.findall(r"plain_cases\((.*?)\)", text) for group in quoted(call)}
    run = {parameter.values[0].id for group in groups for parameter in plain_cases(group)}
    known = {entry.id for entry in all_cases()}
    assert known - run - named - set(TESTED_INSIDE) - set(NOT_YET) == set()
    assert (named | set(TESTED_INSIDE) | set(NOT_YET)) - known == set()
    assert set(NOT_YET) & (run | named) == set()


def quoted(call: str) -> list[str]:
    """The words in quotes among the arguments of a call."""
    return re.findall(r'"([A-Z0-9]{3})"', call)


@pytest.mark.parametrize("place", sorted(set(TESTED_INSIDE.values())))
def test_what_is_tested_inside_is_there(place: str) -> None:
    path, _, name = place.partition("::")
    assert name in (REPOSITORY / path).read_text()
