# AgentENV. `make quickstart` shows it, `make test` tests it, `make help` lists the rest.

SHELL := /bin/bash
.SHELLFLAGS := -euo pipefail -c
.DEFAULT_GOAL := help

CARGO_TARGET_DIR ?= $(CURDIR)/target
export CARGO_TARGET_DIR
BIN := $(CARGO_TARGET_DIR)/release
GUEST_TARGET := x86_64-unknown-linux-musl
GUEST_BIN := $(CARGO_TARGET_DIR)/$(GUEST_TARGET)/guest

.PHONY: help deps deps-test build guest image code-interpreter quickstart stop test test-lab soak check fmt lint deny docs compatibility bench clean

help: ## List the targets
	@grep -hE '^[a-z-]+:.*##' $(MAKEFILE_LIST) | sed -E 's/:[^#]*## /\t/' | column -t -s $$'\t'

deps: ## Install what building and running need (Debian, Ubuntu)
	@scripts/deps.sh run

deps-test: ## Install what the tests need as well
	@scripts/deps.sh test

build: deps guest ## Build everything
	cargo build --release --locked --workspace --bins
	cargo build --release --locked -p aenv-track

guest: ## Build the static guest binaries (init, envd)
	cargo build --profile guest --locked --target $(GUEST_TARGET) -p aenv-init -p aenv-envd

image: build ## Make the base image (an OCI layout) in .build/base-image
	@scripts/base-image.sh .build/base-image

code-interpreter: ## Make the code interpreter's image (an OCI layout) in .build/code-interpreter-image
	@scripts/deps.sh run
	@scripts/code-interpreter-image.sh .build/code-interpreter-image

quickstart: build image ## Build, start a server, and run the main job in front of you
	@scripts/quickstart.sh

stop: ## Stop the server that quickstart left running, and its sandboxes
	@scripts/quickstart.sh stop

check: fmt lint deny docs ## Everything that needs no VM

fmt:
	cargo fmt --all --check

lint:
	cargo clippy --release --locked --workspace --all-targets -- -D warnings

deny: ## Licences, advisories and sources of dependencies
	scripts/deny.sh

docs:
	RUSTDOCFLAGS="-D warnings" cargo doc --release --locked --workspace --no-deps --document-private-items

test: deps-test build image code-interpreter fmt lint deny docs ## Install what the tests need, and run them all
	scripts/test.sh

test-lab: deps-test ## What needs ublk or Firecracker, in a VM with its own kernel (slow; not part of `make test`)
	lab/test.sh

soak: build image ## Mixed load for SOAK_MINUTES (120), and what has grown at its end
	scripts/clients.sh
	.venv/bin/python tests/soak.py --minutes $(or $(SOAK_MINUTES),120)

compatibility: ## Write docs/compatibility.md from the last `make test`
	scripts/compatibility.py .build/compatibility.json docs/compatibility.md

bench: build ## Print the numbers of README.md (needs a running server: make quickstart)
	@$(BIN)/aenv bench

clean: ## Remove what was built
	cargo clean
	rm -rf .build
