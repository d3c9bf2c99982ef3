# make demo: an unmodified Debian guest of 768 MiB in 192 MiB of DRAM, verified by the guest itself.
# make test: every test, with real guests.   make bench: every comparison with its peers.   make install: on this host.
# Each target installs what it lacks (scripts/install-deps.sh) and builds; nothing else has to be done first.
# The built xtask is called, not `cargo xtask`: cargo's features depend on the packages selected, so that would build again.
# The demo and the benches select the same ones where they build (tests/kit/src/workspace.rs).

# install-deps.sh finds or installs cargo; rustup's directory may not be on the PATH of this shell yet.
export PATH := $(PATH):$(HOME)/.cargo/bin

PREFIX ?= /usr
DEMO_PROGRAMS = -p pagodad -p pagoda -p pagoda-shim
PROGRAMS = $(DEMO_PROGRAMS) -p pagoda-server -p pagoda-outbox-server

.PHONY: all demo test bench ci install clean

all:
	cargo build --release $(PROGRAMS) -p xtask

demo:
	scripts/install-deps.sh demo
	cargo build --profile demo $(DEMO_PROGRAMS) -p xtask
	target/demo/xtask demo

test:
	scripts/install-deps.sh test
	cargo build --profile ci --workspace
	target/ci/xtask ci
	target/ci/xtask vm

bench:
	scripts/install-deps.sh test
	cargo build --release $(PROGRAMS) -p xtask -p testkit -p pagoda-bench
	target/release/pagoda-bench all

ci:
	bash .ci/run

install: all
	install -D -m 0755 target/release/pagodad $(DESTDIR)$(PREFIX)/bin/pagodad
	install -D -m 0755 target/release/pagoda $(DESTDIR)$(PREFIX)/bin/pagoda
	ln -sf pagoda $(DESTDIR)$(PREFIX)/bin/pagoda-qemu
	install -D -m 0755 target/release/pagoda-server $(DESTDIR)$(PREFIX)/lib/pagoda/pagoda-server
	install -D -m 0755 target/release/pagoda-outbox $(DESTDIR)$(PREFIX)/lib/pagoda/pagoda-outbox
	install -D -m 0644 target/release/libpagoda_shim.so $(DESTDIR)$(PREFIX)/lib/pagoda/libpagoda_shim.so
	install -D -m 0644 packaging/pagodad.service $(DESTDIR)$(PREFIX)/lib/systemd/system/pagodad.service
	install -D -m 0644 packaging/pagoda-pool.service $(DESTDIR)$(PREFIX)/lib/systemd/system/pagoda-pool.service
	install -D -m 0644 packaging/pagoda-pool-disk.service $(DESTDIR)$(PREFIX)/lib/systemd/system/pagoda-pool-disk.service
	install -D -m 0644 packaging/pagoda-disk@.service $(DESTDIR)$(PREFIX)/lib/systemd/system/pagoda-disk@.service
	install -d -m 0755 $(DESTDIR)/etc/pagoda/vm.d
	test -e $(DESTDIR)/etc/pagoda/pagoda.toml || install -m 0644 packaging/pagoda.toml $(DESTDIR)/etc/pagoda/pagoda.toml
	install -D -m 0644 packaging/apparmor/libvirt-qemu $(DESTDIR)$(PREFIX)/share/doc/pagoda/apparmor-libvirt-qemu
	install -D -m 0644 packaging/sysctl.d/60-pagoda.conf $(DESTDIR)$(PREFIX)/share/doc/pagoda/sysctl-60-pagoda.conf
	install -D -m 0644 packaging/tmpfiles.d/pagoda.conf $(DESTDIR)$(PREFIX)/share/doc/pagoda/tmpfiles-pagoda.conf
	install -d $(DESTDIR)$(PREFIX)/share/man/man1
	target/release/pagoda man $(DESTDIR)$(PREFIX)/share/man/man1

clean:
	cargo clean
	rm -rf out
