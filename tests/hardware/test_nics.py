"""Network counters, from a made-up /sys."""

from pathlib import Path

from megabench.hardware.nics import NicBytes, read_nics, since


def write(path: Path, value: object) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(f"{value}\n")


def test_every_kind_of_interface(tmp_path: Path) -> None:
    net, infiniband = tmp_path / "net", tmp_path / "infiniband"
    write(net / "eth0/statistics/tx_bytes", 100)
    write(net / "eth0/statistics/rx_bytes", 200)
    write(net / "broken/statistics/tx_bytes", "none")
    write(infiniband / "mlx5_0/ports/1/counters/port_xmit_data", 10)
    write(infiniband / "mlx5_0/ports/1/counters/port_rcv_data", 20)
    write(infiniband / "rdmap0s6/ports/1/hw_counters/tx_bytes", 7)
    write(infiniband / "rdmap0s6/ports/1/hw_counters/rx_bytes", 8)
    before = read_nics(net, infiniband)
    assert before == {"eth0": NicBytes(100, 200), "mlx5_0/1": NicBytes(40, 80), "rdmap0s6/1": NicBytes(7, 8)}
    write(net / "eth0/statistics/tx_bytes", 150)
    (infiniband / "rdmap0s6/ports/1/hw_counters/tx_bytes").unlink()
    assert since(before, read_nics(net, infiniband)) == {"eth0": NicBytes(50, 0)}


def test_without_any(tmp_path: Path) -> None:
    assert read_nics(tmp_path / "net", tmp_path / "infiniband") == {}


def test_this_machine_has_loopback() -> None:
    assert "lo" in read_nics()
