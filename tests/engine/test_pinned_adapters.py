"""Pinned adapters stay where they are, and always leave room for the others."""

import pytest
from fake_executor import make_manifest
from test_adapter_manager import activated, ended, make_manager, registered

from ray_lora.engine.adapter_manager import AdapterManager
from ray_lora.errors import CapacityError, NotFoundError


def test_a_pinned_adapter_keeps_its_pages_whoever_comes() -> None:
    adapters = make_manager(num_pages=6, max_resident=2)
    a, b, c = (registered(adapters, name) for name in "abc")
    adapters.pin("a")
    for version in (a, b, c, b, c):
        activated(adapters, version)
        ended(adapters, version)
    assert adapters.resident == ("a", "c")
    adapters.unpin("a")
    activated(adapters, b)
    assert adapters.resident == ("b", "c")


def test_a_pinned_adapter_stays_in_host_memory() -> None:
    adapters = make_manager(num_pages=8)
    registered(adapters, "a")
    registered(adapters, "b")
    adapters.pin("a")
    assert adapters.take_idle("ab") == "b"
    assert adapters.take_idle("a") is None
    adapters.unpin("a")
    assert adapters.take_idle("a") == "a"


def test_a_pinned_adapter_that_is_cold_stays_once_it_is_up() -> None:
    adapters = make_manager(num_pages=8)
    registered(adapters, "a")
    assert adapters.take_idle("a") == "a"
    adapters.pin("a")
    assert adapters.find_cold("a") is not None
    adapters.mark_staged("a")
    assert adapters.take_idle("a") is None


def test_pins_leave_a_slot_and_the_pages_of_the_largest_rank() -> None:
    adapters = AdapterManager(num_pages=6, max_resident=3, max_rank=32)
    for name, rank in (("a", 16), ("b", 32), ("c", 16), ("d", 32)):
        registered(adapters, name, rank)
    adapters.pin("a")
    adapters.pin("b")
    with pytest.raises(CapacityError, match="max_loras 3"):
        adapters.pin("c")
    adapters.unpin("a")
    adapters.pin("a")
    adapters.unpin("b")
    adapters.pin("d")
    for version in (adapters.get("b"), adapters.get("c")):
        assert activated(adapters, version) is not None
        ended(adapters, version)


def test_pins_that_would_leave_too_few_pages_are_refused() -> None:
    adapters = AdapterManager(num_pages=4, max_resident=4, max_rank=48)
    registered(adapters, "a", 16)
    registered(adapters, "b", 32)
    with pytest.raises(CapacityError, match="would leave 2 of 4 pages"):
        adapters.pin("b")
    adapters.pin("a")
    adapters.pin("a")
    adapters.check_integrity()


def test_one_content_under_two_names_is_pinned_while_either_is() -> None:
    adapters = make_manager(num_pages=8)
    registered(adapters, "a", version="v")
    registered(adapters, "b", version="v")
    adapters.pin("a")
    adapters.pin("b")
    adapters.unregister("a")
    assert adapters.take_idle("v") is None
    adapters.unpin("b")
    adapters.unpin("b")
    assert adapters.take_idle("v") == "v"
    adapters.check_integrity()


def test_a_pin_is_the_names_and_moves_to_its_new_content() -> None:
    adapters = make_manager(num_pages=8)
    old = registered(adapters, "a", version="v1")
    adapters.pin("a")
    adapters.hold(old)
    registered(adapters, "a", version="v2")
    assert adapters.take_idle(["v2"]) is None
    adapters.let_go(old)
    assert adapters.take_dead() == ["v1"]
    assert adapters.info("a").pinned
    adapters.check_integrity()


def test_new_content_of_a_pinned_name_must_leave_room_too() -> None:
    adapters = AdapterManager(num_pages=4, max_resident=4, max_rank=32)
    registered(adapters, "a", 16)
    adapters.pin("a")
    assert adapters.check_register("a", make_manifest("fits", 32), load_inplace=True)
    registered(adapters, "b", 16)
    adapters.pin("b")
    with pytest.raises(CapacityError, match="would leave 1 of 4"):
        adapters.check_register("a", make_manifest("large", 32), load_inplace=True)


def test_host_memory_holds_any_registered_adapter_beside_the_pinned_ones() -> None:
    adapters = AdapterManager(num_pages=100, max_resident=9, max_rank=64, max_host_bytes=3000)  # 50 a rank
    registered(adapters, "a", 16)
    registered(adapters, "b", 32)
    adapters.pin("a")
    with pytest.raises(CapacityError, match="max_cpu_lora_bytes 3000"):
        adapters.check_register("c", make_manifest("c", 64), load_inplace=False)
    assert adapters.check_register("c", make_manifest("c", 44), load_inplace=False)
    adapters.unpin("a")
    registered(adapters, "c", 50)
    with pytest.raises(CapacityError, match="max_cpu_lora_bytes 3000"):
        adapters.pin("a")
    assert not adapters.info("a").pinned


def test_only_a_name_can_be_pinned() -> None:
    adapters = make_manager()
    for call in (adapters.pin, adapters.unpin):
        with pytest.raises(NotFoundError):
            call("nobody")


def test_a_name_can_be_registered_before_its_content_is_in_host_memory() -> None:
    adapters = make_manager()
    adapters.register_cold("a", make_manifest("v"))
    assert adapters.info("a").tier == "disk"
    assert adapters.find_cold("a") == make_manifest("v")
    adapters.mark_staged("v")
    assert (adapters.info("a").tier, adapters.info("a").num_loads) == ("host", 1)
    adapters.register_cold("b", make_manifest("v"))
    assert adapters.info("b").tier == "host"
    adapters.check_integrity()
