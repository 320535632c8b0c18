import pytest
from fake_executor import make_manifest

from ray_lora.adapter import AdapterInfo, TierUse
from ray_lora.engine.adapter_manager import AdapterManager
from ray_lora.engine.adapter_version import Version
from ray_lora.errors import (
    AdapterExistsError,
    AdapterRejectedError,
    InvalidRequestError,
    NotFoundError,
    VersionConflictError,
)
from ray_lora.step import AdapterPlan


def make_manager(num_pages: int = 4, max_resident: int = 4) -> AdapterManager:
    return AdapterManager(num_pages, max_resident, max_rank=64)


def registered(adapters: AdapterManager, name: str, rank: int = 16, version: str | None = None) -> Version:
    adapters.register(name, make_manifest(version or name, rank))
    return adapters.get(name)


def activated(adapters: AdapterManager, version: Version) -> AdapterPlan | None:
    """What a running request does first."""
    assert adapters.can_activate(version)
    adapters.hold(version)
    plan = adapters.activate(version)
    adapters.check_integrity()
    return plan


def ended(adapters: AdapterManager, version: Version) -> None:
    """What it does last."""
    adapters.deactivate(version)
    adapters.let_go(version)
    adapters.check_integrity()


@pytest.mark.parametrize(("rank", "num_pages"), [(1, 1), (15, 1), (16, 1), (17, 2), (64, 4)])
def test_an_adapter_takes_a_page_for_every_begun_16_ranks(rank: int, num_pages: int) -> None:
    adapters = make_manager()
    plan = activated(adapters, registered(adapters, "a", rank))
    assert plan is not None
    assert len(plan.pages) == num_pages
    assert adapters.pages.num_free == 4 - num_pages


def test_a_resident_adapter_is_not_paged_in_again() -> None:
    adapters = make_manager()
    version = registered(adapters, "a")
    assert activated(adapters, version) is not None
    assert activated(adapters, version) is None
    ended(adapters, version)
    ended(adapters, version)
    assert adapters.resident == ("a",)
    assert activated(adapters, version) is None


def test_registering_takes_no_page() -> None:
    adapters = make_manager(num_pages=1, max_resident=1)
    for index in range(100):
        registered(adapters, f"a{index}")
    adapters.check_integrity()
    assert adapters.pages.num_free == 1
    assert adapters.resident == ()


def test_every_registered_adapter_can_be_used_whatever_the_number_of_pages() -> None:
    adapters = make_manager(num_pages=2, max_resident=2)
    versions = [registered(adapters, f"a{index}", rank=16 * (1 + index % 2)) for index in range(50)]
    for version in versions * 2:
        assert activated(adapters, version) is not None
        ended(adapters, version)


def test_pages_of_running_requests_stay() -> None:
    adapters = make_manager(num_pages=2, max_resident=2)
    a, b, c = (registered(adapters, name) for name in "abc")
    activated(adapters, a)
    activated(adapters, b)
    assert not adapters.can_activate(c)
    pages = a.pages
    ended(adapters, b)
    assert adapters.can_activate(c)
    activated(adapters, c)
    assert a.pages == pages
    assert b.pages is None


def test_the_least_recently_used_idle_adapter_gives_way() -> None:
    adapters = make_manager(num_pages=2, max_resident=2)
    a, b, c = (registered(adapters, name) for name in "abc")
    activated(adapters, a)
    activated(adapters, b)
    ended(adapters, b)
    ended(adapters, a)
    activated(adapters, c)
    assert adapters.resident == ("a", "c")


def test_as_many_adapters_give_way_as_a_large_one_needs_and_no_more() -> None:
    adapters = make_manager(num_pages=4, max_resident=4)
    small = [registered(adapters, name) for name in "abcd"]
    for version in small:
        activated(adapters, version)
        ended(adapters, version)
    activated(adapters, registered(adapters, "large", rank=48))
    assert adapters.resident == ("d", "large")


def test_max_resident_limits_adapters_however_many_pages_are_free() -> None:
    adapters = make_manager(num_pages=8, max_resident=2)
    a, b, c = (registered(adapters, name) for name in "abc")
    activated(adapters, a)
    activated(adapters, b)
    assert not adapters.can_activate(c)
    ended(adapters, a)
    activated(adapters, c)
    assert adapters.resident == ("b", "c")


def test_a_large_adapter_waits_for_pages_that_are_in_use() -> None:
    adapters = make_manager(num_pages=4, max_resident=4)
    small, large = registered(adapters, "small"), registered(adapters, "large", rank=64)
    activated(adapters, small)
    assert not adapters.can_activate(large)
    ended(adapters, small)
    assert adapters.can_activate(large)


def test_a_version_lives_until_its_last_name_and_its_last_request_are_gone() -> None:
    adapters = make_manager()
    version = registered(adapters, "a")
    activated(adapters, version)
    adapters.unregister("a")
    assert adapters.is_registered("a")
    assert adapters.take_dead() == []
    assert adapters.resident == ()
    ended(adapters, version)
    assert not adapters.is_registered("a")
    assert adapters.pages.num_free == 4
    assert adapters.take_dead() == ["a"]
    assert adapters.take_dead() == []


def test_a_waiting_request_keeps_its_version_alive() -> None:
    adapters = make_manager()
    version = registered(adapters, "a")
    adapters.hold(version)
    adapters.unregister("a")
    assert adapters.take_dead() == []
    assert adapters.can_activate(version)
    adapters.let_go(version)
    assert adapters.take_dead() == ["a"]


def test_reloading_makes_a_new_version_and_leaves_the_old_to_its_requests() -> None:
    adapters = make_manager()
    old = registered(adapters, "a", version="v1")
    activated(adapters, old)
    new = registered(adapters, "a", version="v2")
    assert adapters.get("a") is new
    activated(adapters, new)
    assert set(old.pages or ()).isdisjoint(new.pages or ())
    assert adapters.take_dead() == []
    ended(adapters, old)
    assert adapters.take_dead() == ["v1"]
    assert adapters.resident == ("a",)


def test_two_names_of_one_content_are_one_version() -> None:
    adapters = make_manager()
    first = registered(adapters, "a", version="v")
    assert adapters.check_register("b", make_manifest("v"), load_inplace=False)
    assert registered(adapters, "b", version="v") is first
    activated(adapters, first)
    assert adapters.resident == ("a", "b")
    assert adapters.pages.num_free == 3
    adapters.unregister("a")
    assert adapters.take_dead() == []
    adapters.unregister("b")
    ended(adapters, first)
    assert adapters.take_dead() == ["v"]


def test_a_version_that_comes_back_is_paged_in_again() -> None:
    adapters = make_manager()
    version = registered(adapters, "a")
    activated(adapters, version)
    ended(adapters, version)
    adapters.unregister("a")
    assert adapters.take_dead() == ["a"]
    assert activated(adapters, registered(adapters, "a")) is not None


def test_registering_the_same_content_again_changes_nothing() -> None:
    adapters = make_manager()
    version = registered(adapters, "a")
    assert not adapters.check_register("a", make_manifest("a"), load_inplace=False)
    assert not adapters.check_register("a", make_manifest("a"), load_inplace=True)
    assert registered(adapters, "a") is version
    adapters.unregister("a")
    assert adapters.take_dead() == ["a"]


def test_a_taken_name_is_replaced_only_in_place() -> None:
    adapters = make_manager()
    registered(adapters, "a", version="v1")
    with pytest.raises(AdapterExistsError, match="load_inplace") as caught:
        adapters.check_register("a", make_manifest("v2"), load_inplace=False)
    assert caught.value.param == "lora_name"
    assert adapters.check_register("a", make_manifest("v2"), load_inplace=True)


def test_a_name_moves_only_from_the_version_that_the_writer_expects() -> None:
    adapters = make_manager()
    registered(adapters, "a", version="v1")
    for name, expected in (("a", "v0"), ("b", "v1")):
        with pytest.raises(VersionConflictError, match="points to") as caught:
            adapters.check_register(name, make_manifest("v2"), load_inplace=True, expected_version=expected)
        assert caught.value.param == "expected_version"
    assert adapters.check_register("a", make_manifest("v2"), load_inplace=True, expected_version="v1")
    assert not adapters.check_register("a", make_manifest("v1"), load_inplace=True, expected_version="v0")


def test_a_rank_above_the_limit_is_refused_by_name() -> None:
    with pytest.raises(AdapterRejectedError, match="rank 65 exceeds max_lora_rank 64") as caught:
        make_manager().check_register("a", make_manifest("a", rank=65), load_inplace=False)
    assert caught.value.param == "r"


def test_an_adapter_is_refused_where_lora_is_off() -> None:
    with pytest.raises(AdapterRejectedError, match="max_loras is 0"):
        make_manager(num_pages=0, max_resident=0).check_register("a", make_manifest("a"), load_inplace=False)


def test_the_least_recently_used_without_requests_leaves_host_memory() -> None:
    adapters = make_manager()
    first, second, third = (registered(adapters, name) for name in "abc")
    activated(adapters, first)
    ended(adapters, first)
    adapters.hold(second)
    assert adapters.take_idle("abc") == "c"
    assert adapters.find_cold("c") == third.manifest
    assert adapters.take_idle("ab") == "a"
    assert adapters.take_idle("b") is None, "a request holds it"
    assert [info.tier for info in adapters.list_adapters()] == ["disk", "host", "disk"]
    adapters.check_integrity()
    adapters.mark_staged("c")
    assert adapters.find_cold("c") is None
    adapters.mark_staged("gone")
    adapters.unregister("c")
    assert adapters.take_idle("bc") == "c", "the dead go first"


def test_what_has_just_come_to_host_memory_is_not_the_next_to_leave() -> None:
    adapters = make_manager()
    for name in "abc":
        registered(adapters, name)
    assert adapters.take_idle("abc") == "a"
    adapters.mark_staged("a")
    assert adapters.take_idle("abc") == "b"


def test_an_unknown_name_is_not_found() -> None:
    adapters = make_manager()
    for call in (adapters.get, adapters.info, adapters.unregister):
        with pytest.raises(NotFoundError, match="'nobody'"):
            call("nobody")


def test_the_list_tells_of_every_name() -> None:
    adapters = AdapterManager(8, 4, max_rank=64, now=lambda: 1000.0)
    version = registered(adapters, "a", rank=20, version="v")
    registered(adapters, "b", version="w")
    activated(adapters, version)
    adapters.hold(version)
    adapters.mark_used("a")
    adapters.pin("b")
    adapters.set_weight("b", 2.5)
    assert adapters.list_adapters() == [
        AdapterInfo(
            name="a",
            version="v",
            source="/adapters/v",
            rank=20,
            num_pages=2,
            num_bytes=1000,
            tier="device",
            pinned=False,
            weight=1.0,
            num_running=1,
            num_waiting=1,
            num_page_ins=1,
            last_used=1000.0,
            num_loads=1,
        ),
        AdapterInfo(
            name="b",
            version="w",
            source="/adapters/w",
            rank=16,
            num_pages=1,
            num_bytes=800,
            tier="host",
            pinned=True,
            weight=2.5,
            num_running=0,
            num_waiting=0,
            num_page_ins=0,
            last_used=None,
            num_loads=1,
        ),
    ]
    assert adapters.pages.use(page_bytes=10) == TierUse(1, 4, 20, 80)


def test_a_weight_is_the_names_and_stays_when_its_content_is_replaced() -> None:
    adapters = AdapterManager(8, 4, max_rank=64, base_weight=5.0)
    registered(adapters, "a", version="v1")
    registered(adapters, "alias", version="v1")
    adapters.set_weight("a", 3.0)
    adapters.pin("a")
    registered(adapters, "a", version="v2")
    info = adapters.info("a")
    assert (info.version, info.weight, info.pinned) == ("v2", 3.0, True)
    assert (adapters.weight("a"), adapters.weight("alias"), adapters.weight(None)) == (3.0, 1.0, 5.0)
    adapters.unregister("a")
    assert adapters.weight("a") == 1.0
    registered(adapters, "a", version="v1")
    assert adapters.info("a").weight == 1.0


@pytest.mark.parametrize("weight", [0, -1.0, 0.0009, 1000.1, float("nan"), float("inf")])
def test_a_weight_out_of_range_is_refused(weight: float) -> None:
    adapters = make_manager()
    registered(adapters, "a")
    with pytest.raises(InvalidRequestError, match=r"weight must be from 0\.001 to 1000") as caught:
        adapters.set_weight("a", weight)
    assert caught.value.param == "weight"
    assert adapters.weight("a") == 1.0
    with pytest.raises(NotFoundError):
        adapters.set_weight("nobody", 2.0)


def test_pages_are_used_again_for_ever() -> None:
    adapters = make_manager(num_pages=4, max_resident=3)
    for index in range(1000):
        version = registered(adapters, f"a{index}", rank=1 + index % 64)
        activated(adapters, version)
        if index % 3:
            adapters.unregister(f"a{index}")
            ended(adapters, version)
        else:
            ended(adapters, version)
            adapters.unregister(f"a{index}")
        assert adapters.take_dead() == [f"a{index}"]
    assert adapters.pages.num_free == 4
