//! What every image gets before its first step: the user `user` with sudo and a home, bash, and a CA bundle.

use super::{
    guest::{Guest, GuestError},
    steps::root,
};

/// Part of the cache key: a change here provisions images again.
pub(super) const SCRIPT: &str = r#"
set -eu
lacking=
for tool in bash sudo; do command -v "$tool" >/dev/null 2>&1 || lacking="$lacking $tool"; done
[ -s /etc/ssl/certs/ca-certificates.crt ] || [ -s /etc/pki/tls/certs/ca-bundle.crt ] || lacking="$lacking ca-certificates"
if [ -n "$lacking" ]; then
  echo "Installing$lacking"
  if command -v apt-get >/dev/null 2>&1; then
    export DEBIAN_FRONTEND=noninteractive
    apt-get update -q
    apt-get install -q -y --no-install-recommends $lacking
    rm -rf /var/lib/apt/lists/*
  elif command -v apk >/dev/null 2>&1; then apk add --no-cache $lacking shadow
  elif command -v dnf >/dev/null 2>&1; then dnf install -y $lacking && dnf clean all
  elif command -v microdnf >/dev/null 2>&1; then microdnf install -y $lacking
  else
    echo "the image lacks$lacking and has none of apt-get, apk and dnf to install them" >&2
    exit 78
  fi
fi
if ! id user >/dev/null 2>&1; then
  if command -v useradd >/dev/null 2>&1; then useradd --create-home --shell /bin/bash user
  else adduser -D -s /bin/bash user; fi
fi
home=$(sed -n 's/^user:[^:]*:[^:]*:[^:]*:[^:]*:\([^:]*\):.*/\1/p' /etc/passwd | head -n 1)
mkdir -p "$home"
if [ -d /etc/skel ]; then cp -R -n /etc/skel/. "$home/" 2>/dev/null || true; fi
chown -R user:user "$home"
mkdir -p /etc/sudoers.d
printf 'user ALL=(ALL) NOPASSWD:ALL\n' > /etc/sudoers.d/user
chmod 0440 /etc/sudoers.d/user
"#;

pub(super) async fn run(guest: &Guest<'_>) -> Result<(), GuestError> {
    root(guest, SCRIPT, &[]).await
}
