#!/bin/bash
# Hosts on one machine. Each is a set of network, UTS, PID, IPC and mount namespaces: its own
# address, name, process table, sshd, /tmp, /dev/shm and /run. The rest of the file system is
# shared, as on a cluster. They hang on a bridge in this script's own network namespace, so
# nothing touches the machine's network.
#
#   unshare --net hosts.sh DIR N    brings up host0 (login) .. hostN, says "done", then obeys
#                                   lines from its input, each answered with "done" or "failed":
#       boot HOST | crash HOST | link HOST up|down | second HOST on|off
#   hosts.sh on DIR HOST COMMAND... runs a command inside, by hand
#
# Whoever holds the input holds the hosts: at its end they go down and DIR is removed.
set -u
SELF=$(readlink -f "$0")

address() { [ "$1" = host0 ] && echo 10.77.0.100 || echo "10.77.0.${1#host}"; }
# Fixed, or a host that boots again is hidden by what others remember of it.
hardware() { printf 02:00:00:00:00:%02x "$(address "$1" | cut -d. -f4)"; }
pid() { cat "$DIR/$1/pid"; }
inside() { local host=$1; shift; nsenter -t "$(pid "$host")" -a -- "$@"; }
within_10s() { local i; for i in $(seq 500); do [ -s "$1" ] && return; sleep 0.02; done; return 1; }

init() { # what a host's first process does; its number is still the machine's when it is read
  local self host=$1
  read -r self _ < /proc/self/stat
  hostname "$host" &&
    mount -t proc proc /proc && { mount -t sysfs sysfs /sys 2>/dev/null || :; } &&
    set_aside &&
    mount -t tmpfs -o mode=1777 tmpfs /tmp && mount -t tmpfs -o mode=1777 tmpfs /dev/shm &&
    mount -t tmpfs -o mode=755 tmpfs /run && mkdir /run/sshd &&
    bring_back &&
    mount --bind "$DIR/$host/hosts" /etc/hosts &&
    mount --bind "$DIR/ssh/ssh_config" /etc/ssh/ssh_config || exit 1
  [ ! -d ~/.ssh ] || mount -t tmpfs tmpfs ~/.ssh   # nothing of the user's own keys and settings
  echo "$self" > "$DIR/$host/pid.new"; mv "$DIR/$host/pid.new" "$DIR/$host/pid"
  exec env --ignore-signal=CHLD sleep infinity     # the kernel itself reaps orphans then
}

# What must be seen in every host though it lies in /tmp, where each host has its own: the
# folders named in SEEN. Read-only there.
set_aside() {
  local i=0 folder
  while IFS= read -r folder; do
    [ -n "$folder" ] || continue
    mkdir -p "$DIR/seen/$i" && mount --bind "$folder" "$DIR/seen/$i" || return
    i=$((i + 1))
  done <<< "${SEEN:-}"
}
bring_back() {
  local i=0 folder
  while IFS= read -r folder; do
    [ -n "$folder" ] || continue
    mkdir -p "$folder" && mount --bind "$DIR/seen/$i" "$folder" &&
      mount -o remount,bind,ro "$folder" && umount "$DIR/seen/$i" || return
    i=$((i + 1))
  done <<< "${SEEN:-}"
}

boot() { # in two halves, so that all hosts come up at the same time
  switch_on "$1" && connect "$1"
}
switch_on() { # setpriv: a host does not outlive this script, not even its kill -9
  rm -f "$DIR/$1/pid"
  setpriv --pdeathsig KILL unshare --net --uts --ipc --pid --mount --fork --kill-child \
    "$BASH" "$SELF" init "$DIR" "$1" </dev/null >"$DIR/$1/init.log" 2>&1 &
  holder[$1]=$!
}
connect() {
  local host=$1 to
  within_10s "$DIR/$host/pid" || { cat "$DIR/$host/init.log" >&2; return 1; }
  to=$(pid "$host")
  ip link delete "$host" 2>/dev/null
  ip link add "$host" type veth peer name eth0 address "$(hardware "$host")" netns "$to" &&
    ip link set "$host" master bridge up &&
    nsenter -t "$to" -n ip -batch - <<IP &&
link set lo up
address add $(address "$host")/24 dev eth0
link set eth0 up
IP
    inside "$host" /usr/sbin/sshd -f "$DIR/ssh/sshd_config" -E "$DIR/$host/sshd.log" </dev/null &&
    within_10s "/proc/$to/root/run/sshd.pid" # written once it listens
}

crash() { # its first process dies and all others with it; what they were connected to sees that
  kill -9 "$(pid "$1")" && rm -f "$DIR/$1/pid"
  wait "${holder[$1]}" 2>/dev/null
  return 0
}

second() { # eth1 is up, has an address, and everything sent there is lost
  ip link delete "$1-second" 2>/dev/null
  [ "$2" = off ] && return
  ip link add "$1-second" type veth peer name eth1 netns "$(pid "$1")" &&
    ip link set "$1-second" up &&
    nsenter -t "$(pid "$1")" -n ip -batch - <<IP
address add $(address "$1" | sed s/10.77/10.78/)/24 dev eth1
link set eth1 arp off up
IP
}

ssh_files() ( # in a process of its own, for the folder
  mkdir -p "$DIR/ssh" && cd "$DIR/ssh" &&
    ssh-keygen -q -t ed25519 -N '' -f id && ssh-keygen -q -t ed25519 -N '' -f hostkey || return
  cp id.pub authorized_keys && chmod 600 authorized_keys
  echo "host* $(cut -d' ' -f1-2 hostkey.pub)" > known_hosts
  cat > sshd_config <<CONF
Port 22
HostKey $DIR/ssh/hostkey
AuthorizedKeysFile $DIR/ssh/authorized_keys
PidFile /run/sshd.pid
PermitRootLogin prohibit-password
PasswordAuthentication no
UsePAM no
UseDNS no
StrictModes no
PrintMotd no
MaxStartups 100:30:200
CONF
  cat > ssh_config <<CONF
Host host*
  IdentityFile $DIR/ssh/id
  IdentitiesOnly yes
  UserKnownHostsFile $DIR/ssh/known_hosts
  GlobalKnownHostsFile /dev/null
  StrictHostKeyChecking yes
  CheckHostIP no
  BatchMode yes
  ConnectTimeout 5
  LogLevel ERROR
CONF
)

up() {
  local host all
  all=$(seq -f host%g 0 "$1")
  ssh_files && ip link set lo up && ip link add bridge type bridge && ip link set bridge up || return
  for host in $all; do
    mkdir -p "$DIR/$host" || return
    # The second form is what PyTorch looks up; where no DNS answers, it warns.
    { echo 127.0.0.1 localhost
      for h in $all; do echo "$(address "$h") $h"; echo "::ffff:$(address "$h") $h"; done
    } > "$DIR/$host/hosts"
    switch_on "$host"
  done
  for host in $all; do connect "$host" || return; done
}
down() {
  trap '' INT TERM
  kill -9 "${holder[@]}" 2>/dev/null # the holders' first processes die with them
  wait
  cd / && rm -rf "$DIR"
}

if [ "$1" = init ]; then DIR=$2; init "$3"; fi
if [ "$1" = on ]; then DIR=$2; shift 2; inside "$@"; exit; fi
DIR=$1; declare -A holder=()
trap down EXIT; trap exit INT TERM
up "$2" || exit 1
echo "done"
while read -r command host state; do
  case $command in
    boot | crash) "$command" "$host";;
    link) ip link set "$host" "$state";;     # the cable, at the end of the switch
    second) second "$host" "$state";;
    *) false;;
  esac && echo "done" || echo failed
done
