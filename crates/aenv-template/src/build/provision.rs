//! What every image gets before its first step: the user `user` with sudo and a home, bash, a CA bundle, and the programs that the
//! clients' ready commands call.

use std::collections::BTreeMap;

use super::{
    guest::{Exec, Guest, GuestError},
    steps::root,
};

/// Part of the cache key: a change here provisions images again.
///
/// Packages are called by Debian's names until they are installed. A CA bundle stays where the distribution has it, and can also be
/// read where most programs look for one.
pub(super) const SCRIPT: &str = r#"
set -eu
has() { command -v "$1" >/dev/null 2>&1; }
bundle() {
  for file in /etc/ssl/certs/ca-certificates.crt /etc/pki/tls/certs/ca-bundle.crt /etc/ssl/ca-bundle.pem /etc/ssl/cert.pem; do
    if [ -s "$file" ]; then echo "$file"; return; fi
  done
}
manager=
for one in apt-get apk dnf microdnf yum; do if has $one; then manager=$one; break; fi; done
install() {
  packages=
  for name; do
    case $manager:$name in
      apk:* | apt-get:*) ;;
      *:iproute2) name=iproute ;;
      *:procps) name=procps-ng ;;
      *:useradd) name=shadow-utils ;;
    esac
    case $manager:$name in
      apk:useradd) name=shadow ;;
      apt-get:useradd) name=passwd ;;
    esac
    packages="$packages $name"
  done
  echo "Installing$packages"
  case $manager in
    apt-get)
      export DEBIAN_FRONTEND=noninteractive
      apt-get update -q && apt-get install -q -y --no-install-recommends $packages && rm -rf /var/lib/apt/lists/* ;;
    apk) apk add --no-cache $packages ;;
    *) $manager install -y $packages && { $manager clean all || true; } ;;
  esac
}

needed= helpful=
for tool in bash sudo; do has $tool || needed="$needed $tool"; done
[ -n "$(bundle)" ] || needed="$needed ca-certificates"
id user >/dev/null 2>&1 || has useradd || has adduser || needed="$needed useradd"
has curl || helpful="$helpful curl"
has ss || helpful="$helpful iproute2"
has pgrep || helpful="$helpful procps"
if [ -n "$needed" ] && [ -z "$manager" ]; then
  echo "the image lacks$needed, and has none of apt-get, apk and dnf to install it" >&2
  exit 78
fi
if [ -n "$needed" ] && ! install $needed $helpful && ! install $needed; then
  echo "the image lacks$needed, and $manager did not install it" >&2
  exit 78
fi
if [ -n "$helpful" ] && [ -z "$needed" ]; then
  if [ -z "$manager" ] || ! install $helpful; then
    echo "the image lacks$helpful: ready commands that use it will fail" >&2
  fi
fi

[ -x /bin/bash ] || ln -s "$(command -v bash)" /bin/bash
found=$(bundle)
if [ ! -e /etc/ssl/certs/ca-certificates.crt ]; then
  mkdir -p /etc/ssl/certs
  ln -s "$found" /etc/ssl/certs/ca-certificates.crt
fi
if ! id user >/dev/null 2>&1; then
  group=
  if grep -q '^user:' /etc/group 2>/dev/null; then group=user; fi
  if has useradd; then useradd --create-home --shell /bin/bash ${group:+-g "$group"} user
  else adduser -D -s /bin/bash ${group:+-G "$group"} user; fi
fi
home=$(sed -n 's/^user:[^:]*:[^:]*:[^:]*:[^:]*:\([^:]*\):.*/\1/p' /etc/passwd | head -n 1)
mkdir -p "$home"
for entry in /etc/skel/.[!.]* /etc/skel/*; do
  if [ -e "$entry" ] && [ ! -e "$home/${entry##*/}" ]; then cp -R "$entry" "$home/"; fi
done
chown -R "user:$(id -g user)" "$home"
mkdir -p /etc/sudoers.d
printf 'user ALL=(ALL) NOPASSWD:ALL\n' > /etc/sudoers.d/user
chmod 0440 /etc/sudoers.d/user
grep -Eq '^[#@]includedir[[:space:]]+/etc/sudoers.d' /etc/sudoers || echo '@includedir /etc/sudoers.d' >> /etc/sudoers
"#;

/// Prepares the image, and tries what it has become. The error is what a user is told.
pub(super) async fn run(guest: &Guest<'_>) -> Result<(), String> {
    root(guest, SCRIPT, &[]).await.map_err(told)?;
    let args = ["-l", "-c", "sudo -n true"];
    let tried = Exec { program: "/bin/bash", args: &args, user: "user", cwd: "", env: &BTreeMap::new() };
    guest.exec(tried).await.map_err(|error| format!("sudo does not work in it: {}", told(error)))
}

fn told(error: GuestError) -> String {
    match error {
        GuestError::Exit { said, .. } if !said.is_empty() => said,
        other => other.to_string(),
    }
}
