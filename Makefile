# Two commands on a fresh machine: `make run` does the work of a virtual machine host on it, `make test` its tests.

CARGO ?= cargo
HUGEMM = $(or $(CARGO_TARGET_DIR),target)/release/hugemm
DEBUG = $(or $(CARGO_TARGET_DIR),target)/debug
ARM = aarch64-unknown-linux-musl
ARM_KERNEL = aarch64-unknown-none-softfloat
LOOM = RUSTFLAGS="--cfg loom" CARGO_TARGET_DIR=target/loom

# The parts of `make test`, with the seconds that each may take from nothing on two quiet cores, beside the other rows'.
PARTS = "test-host=540 test-examples=20" "test-command=540" "test-loom=120 test-release=120 test-bare=45 test-kernel=180 test-arm=180"

test-%: export CARGO_TARGET_X86_64_UNKNOWN_LINUX_GNU_RUNNER = $(CURDIR)/scripts/run-test.sh
test-%: export CARGO_TARGET_AARCH64_UNKNOWN_LINUX_GNU_RUNNER = $(CURDIR)/scripts/run-test.sh

# What has no std; what of it has protocols that loom explores; what Miri can interpret.
BARE = -p hugemm $(addprefix -p hugemm-,base clear frames heap paging hugetlb kva vm reclaim lz4 workloads)
LOOM_LIBS = $(addprefix -p hugemm-,base clear frames heap paging hugetlb vm reclaim)
MIRI = $(addprefix -p hugemm-,base clear frames heap paging kva vm reclaim lz4 threads)

.PHONY: help run build test test-host test-command test-examples test-release test-loom test-bare test-arm test-kernel test-debug test-arceos bench-arceos test-ostd bench-ostd mutants sharing soak races lint lines package semver size dist test-systemd deep clean

help:
	@echo "make run    the work of a virtual machine host, once through, on this machine (a minute or two)"
	@echo "make test   host, loom, code generation, bare-metal builds, arm64 and the reference kernel under emulation"
	@echo "make test-debug  the reference kernel with the feature debug: planted uses after free, double frees and leaks are found (no part of make test)"
	@echo "make test-arceos  an ArceOS unikernel from the registry on hugemm's frames and heap, x86-64 and arm64 (needs a nightly; no part of make test)"
	@echo "make test-ostd  an OSTD kernel on hugemm's frames and heap: OSTD's 221 tests and ours (needs a nightly; no part of make test)"
	@echo "make lint   formatting, clippy, documentation, dependencies"
	@echo "make package  every published crate as the registry would get it, built from that"
	@echo "make semver BASE=v0.1.0  the public API against that of a tag or commit"
	@echo "make size   what hugemm adds to a kernel's text, by crate, at opt-level 3 and s"
	@echo "make mutants CRATE=vm   changes a crate here and there and says which changes no test of it notices (SAMPLE=60, SEED=...)"
	@echo "make sharing  which cache lines two CPUs share, against the table in the tree (SHARING=write, SHARING=\"show PART-OF-A-NAME\")"
	@echo "make dist   a static binary, manual pages, systemd units, and a Debian package of them, in target/dist"
	@echo "make test-systemd  that package under a real systemd, in a root of its own (needs root)"
	@echo "make lines  what each package costs in lines"
	@echo "make soak   ten minutes of everything at once, in which not one byte may be wrong (SOAK=600 seconds)"
	@echo "make races  the engine's tests with atomics that let other threads run now and then (ten minutes)"
	@echo "make deep   Miri, unbounded loom, long stress (tens of minutes)"

build:
	$(CARGO) build --release --locked -p hugemm-cli

run: build
	$(HUGEMM) run

test:
	@MAKE="$(MAKE)" scripts/parts.sh $(PARTS)
	@echo "make test: all green"

test-host: export ELSEWHERE = commands leases
test-host:
	$(CARGO) test --workspace --locked

# The command, as its users meet it, on a pool that is not empty. Much of it waits, which leaves the CPUs to the other parts.
test-command:
	@scripts/need.sh program qemu-system-x86_64 qemu-system-x86 || echo "skipped: leases to QEMU"
	scripts/with-pool.sh 64 $(CARGO) test --workspace --locked --test commands --test leases

# Programs that a newcomer would start from; each checks what it did.
test-examples:
	$(CARGO) build --workspace --locked $(addprefix --bin hugemm-example-,std-platform vmm-prefault second-stage map-file)
	$(DEBUG)/hugemm-example-std-platform
	$(DEBUG)/hugemm-example-vmm-prefault 64
	$(DEBUG)/hugemm-example-second-stage
	$(DEBUG)/hugemm-example-map-file
	@if scripts/need.sh target x86_64-unknown-none && scripts/need.sh program qemu-system-x86_64 qemu-system-x86; then \
	    CARGO="$(CARGO)" examples/ring0/run.sh && CARGO="$(CARGO)" examples/two-cpus/run.sh; \
	else echo "skipped: the ring-0 example, and the one with two CPUs"; fi
	@if scripts/need.sh target $(ARM_KERNEL) && scripts/need.sh program qemu-system-aarch64 qemu-system-arm; then \
	    CARGO="$(CARGO)" examples/el1/run.sh; else echo "skipped: the arm64 example"; fi

# The optimiser's output is what ships: the dispatch is judged by disassembly, the fence stress runs at full speed, and
# the heap believes its frees, or with the feature hardened nearly.
test-release:
	$(CARGO) test --release --locked -p hugemm-clear --test codegen
	$(CARGO) test --release --locked -p hugemm-clear --test rules fences
	$(CARGO) test --release --locked -p hugemm-frames --test codegen
	$(CARGO) test --release --locked -p hugemm-heap --test rules less
	$(CARGO) test --release --locked -p hugemm-heap --features hardened --test rules hardened

# Bounded: a preemption bound of 3 finds every bug planted so far. `make deep` lifts it.
test-loom:
	$(LOOM) LOOM_MAX_PREEMPTIONS=3 $(CARGO) test --profile loom --locked $(LOOM_LIBS) --lib loom_tests
	$(LOOM) LOOM_MAX_PREEMPTIONS=3 $(CARGO) test --profile loom --locked -p hugemm-frames --test loom
	$(LOOM) LOOM_MAX_PREEMPTIONS=3 $(CARGO) test --profile loom --locked -p hugemm-paging --test loom_shootdown

# The crates build without std, without vector registers, on both architectures; the facade also with any one feature alone, and where
# hugemm has no page tables. There a program that names no format of its own is refused.
test-bare:
	@targets=; for target in x86_64-unknown-none aarch64-unknown-none; do \
	    if scripts/need.sh target $$target; then targets="$$targets --target $$target"; else echo "skipped: $$target"; fi; \
	done; \
	[ "$$targets" ] || exit 0; \
	$(CARGO) check --locked $$targets $(BARE) || exit 1; \
	for feature in clear frames heap paging hugetlb kva vm reclaim; do \
	    $(CARGO) check --locked --quiet $$targets -p hugemm --no-default-features --features $$feature || exit 1; \
	done
	@if scripts/need.sh target x86_64-unknown-none; then \
	    $(CARGO) check --locked --target x86_64-unknown-none -p hugemm-x86_64; fi
	@if scripts/need.sh target riscv64gc-unknown-none-elf; then \
	    $(CARGO) check --locked --target riscv64gc-unknown-none-elf -p hugemm; fi
	@for target in x86_64-unknown-none riscv64gc-unknown-none-elf; do \
	    if scripts/need.sh target $$target; then CARGO="$(CARGO)" scripts/refused.sh $$target || exit 1; fi; \
	done

# The arm64 primitives, bit for bit, under user-mode emulation; the reference kernel on arm64.
test-arm:
	@if scripts/need.sh target $(ARM) && scripts/need.sh program qemu-aarch64 qemu-user; then \
	    for cpu in max cortex-a57; do \
	        QEMU_CPU=$$cpu CARGO_TARGET_AARCH64_UNKNOWN_LINUX_MUSL_RUNNER=qemu-aarch64 \
	        $(CARGO) test --locked --target $(ARM) -p hugemm-clear --test rules primitives || exit 1; \
	    done; \
	else echo "skipped: arm64 tests"; fi
	@if scripts/need.sh target $(ARM_KERNEL) && scripts/need.sh program qemu-system-aarch64 qemu-system-arm; then \
	    $(CARGO) test --workspace --locked --test commands -- --ignored --test-threads 3 kernel::arm64::; \
	else echo "skipped: the reference kernel on arm64"; fi

# The reference kernel under emulation with 1, 2, 4 and 8 CPUs; guests that panic, fault, hang or reset; planted bugs.
test-kernel:
	@if scripts/need.sh target x86_64-unknown-none && scripts/need.sh program qemu-system-x86_64 qemu-system-x86; then \
	    $(CARGO) test --workspace --locked --test commands -- --ignored --test-threads 3 kernel::x86::; \
	else echo "skipped: the reference kernel"; fi

# The reference kernel with its memory watched: it finds what its self-test plants, and nothing else. No part of `make test`: a kernel of
# its own has to be built.
test-debug: build
	$(CARGO) test --locked -p hugemm-frames --features debug --test rules debug::
	$(CARGO) test --release --locked -p hugemm-heap --features debug --test rules misuse::
	$(CARGO) build --release --locked --target x86_64-unknown-none -p hugemm-kernel-commands --features debug --target-dir target/debug-kernel
	$(HUGEMM) boot --cpus 2 --image target/debug-kernel/x86_64-unknown-none/release/hugemm-kernel-commands -- selftest --seconds 20

# A workspace of its own, with a nightly compiler: see adapters/arceos/README.md.
test-arceos:
	@adapters/arceos/test.sh

bench-arceos:
	@adapters/arceos/test.sh bench

# The same: see adapters/ostd/README.md.
test-ostd:
	@adapters/ostd/test.sh

bench-ostd:
	@adapters/ostd/test.sh bench

# See docs/mutants.md.
SAMPLE ?= 60
SEED ?= $(shell git rev-parse HEAD)
mutants:
	@CARGO="$(CARGO)" scripts/mutants.sh "$(CRATE)" "$(SAMPLE)" "$(SEED)"

# Counted on one CPU, under valgrind: see docs/scale.md. Quiet cores need about six minutes.
SHARING ?=
sharing:
	@if scripts/need.sh program valgrind valgrind; then \
	    $(CARGO) run --profile sharing --locked --quiet -p hugemm-sharing -- $(SHARING); \
	else echo "skipped: sharing"; fi

# Ten minutes, beside each other: frames are owned once, while some are poisoned and others come and go; processes that share, fork, pin,
# are poisoned and are paged out read what they wrote, in orders that seeds decide; programs of all kinds have leases, one memory for each
# file; and the reference kernel's self-test with all its parts, on eight CPUs. All is built before the first begins.
SOAK ?= 600
SOAKS = soak-frames soak-processes soak-leases soak-kernel
.PHONY: $(SOAKS)
soak-%: export HUGEMM_SOAK_SECONDS = $(SOAK)
soak: build
	@$(MAKE) --no-print-directory $(filter-out soak-kernel,$(SOAKS)) ONLY=--no-run
	@MAKE="$(MAKE)" scripts/parts.sh $(addsuffix =$$(($(SOAK) + 60)),$(SOAKS))
soak-frames:
	$(CARGO) test --release --locked -p hugemm-workloads --test soak $(ONLY)
soak-processes:
	$(CARGO) test --release --locked -p hugemm-schedule --test system every_word $(ONLY)
soak-leases:
	$(CARGO) test --release --locked -p hugemm-lease --test processes $(ONLY) -- "at once"
soak-kernel:
	$(HUGEMM) boot --cpus 8 --timeout $$(($(SOAK) * 2 + 300)) -- selftest --seconds $(SOAK)

# Races that need a thread to stop between two steps: see crates/base/src/perturb.rs.
RACES = $(addprefix -p hugemm-,base frames heap paging hugetlb kva vm reclaim)
races:
	RUSTFLAGS="--cfg perturb" CARGO_TARGET_DIR=target/perturb $(CARGO) test --locked --tests $(RACES)

lint:
	$(CARGO) fmt --all --check
	$(CARGO) clippy --workspace --all-targets --locked -- -D warnings
	@if scripts/need.sh target x86_64-unknown-none; then \
	    $(CARGO) clippy --locked --target x86_64-unknown-none -p hugemm-kernel -p hugemm-kernel-commands -p hugemm-example-ring0 -- -D warnings; fi
	@if scripts/need.sh target $(ARM_KERNEL); then \
	    $(CARGO) clippy --locked --target $(ARM_KERNEL) -p hugemm-kernel -p hugemm-kernel-commands -p hugemm-example-el1 -- -D warnings; fi
	RUSTFLAGS="--cfg perturb" CARGO_TARGET_DIR=target/perturb $(CARGO) check --locked $(RACES)
	RUSTDOCFLAGS="-D warnings" $(CARGO) doc --workspace --no-deps --locked
	@if command -v cargo-deny >/dev/null 2>&1; then $(CARGO) deny --locked check bans licenses sources; \
	else echo "skipped: cargo deny (install it with: cargo install --locked cargo-deny)"; fi

# Below 1.0 a minor version may break; CHANGELOG.md says what.
semver:
	@CARGO="$(CARGO)" scripts/semver.sh "$(BASE)"

size:
	@if scripts/need.sh target x86_64-unknown-none && scripts/need.sh program nm binutils; then \
	    CARGO="$(CARGO)" scripts/size.sh; else echo "skipped: sizes"; fi

# In the order of their dependencies, which cargo finds. Publishing is the same without --dry-run.
# What an earlier run unpacked and built under the same version, cargo would take for this one's.
package:
	rm -rf target/packaging $(or $(CARGO_HOME),$(HOME)/.cargo)/registry/src/-*/hugemm-*
	$(CARGO) publish --workspace --dry-run --locked --target-dir target/packaging
	rm -rf target/packaging

# For hosts without Rust: see scripts/dist.sh.
dist:
	@CARGO="$(CARGO)" scripts/dist.sh

# The package under a real systemd: this machine's, or that of another root (SYSTEMD_ROOT=).
test-systemd: dist
	@scripts/test-systemd.sh target/dist/hugemm_*_$$(dpkg --print-architecture).deb $(SYSTEMD_ROOT)

# What each package costs in lines of Rust.
lines:
	@scripts/lines.sh

# What takes long. The nightly toolchain also checks that each compile-fail example fails for the reason it states.
deep:
	$(LOOM) $(CARGO) test --profile loom --locked $(LOOM_LIBS) --lib loom_tests
	$(LOOM) $(CARGO) test --profile loom --locked -p hugemm-frames --test loom
	$(LOOM) LOOM_MAX_PREEMPTIONS=5 $(CARGO) test --profile loom --locked -p hugemm-paging --test loom_shootdown
	$(CARGO) +nightly test --locked --doc -p hugemm-base --target-dir target/nightly
	MIRIFLAGS="-Zmiri-permissive-provenance -Zmiri-disable-isolation" $(CARGO) +nightly miri test --locked $(MIRI) --target-dir target/miri
	HUGEMM_SOAK=100 $(CARGO) test --release --locked -p hugemm-frames --test stress
	HUGEMM_SOAK=100 $(CARGO) test --release --locked -p hugemm-heap --test rules stress
	HUGEMM_SOAK=100 $(CARGO) test --release --locked -p hugemm-paging --test model
	HUGEMM_SOAK=20 $(CARGO) test --release --locked -p hugemm-reclaim
	HUGEMM_STRESS_ITERATIONS=100000000 $(CARGO) test --release --locked -p hugemm-clear --test rules fences -- --nocapture
	$(MAKE) --no-print-directory sharing

clean:
	$(CARGO) clean
