#!/bin/bash
# The machine's own NVMe disks, as one (RAID 0), below Docker: what a container writes outside of volumes lies
# there. Runs at each boot before Docker starts. Where the machine has none, or a step fails, Docker stays on the
# gp3 disk; a line in /var/log/cloud-init-output.log says why.
store=/mnt/instance-store
array=/dev/md/instance-store
kept="/var/lib/docker /var/lib/containerd"

say() {
  echo "instance store: $*"
}

# The one block device to use: a disk, or the array of several, which is there already after a reboot.
find_disk() {
  local disks
  mapfile -t disks < <(lsblk --nodeps --noheadings --paths --output NAME,MODEL |
    awk '/NVMe Instance Storage/ { print $1 }')
  case ${#disks[@]} in
  0) return 1 ;;
  1) echo "${disks[0]}" ;;
  *)
    command -v mdadm >/dev/null || timeout 120 yum -q -y install mdadm >&2 || return 1
    if ! mdadm --assemble "$array" "${disks[@]}" >&2; then
      mdadm --create "$array" --run --level=0 --raid-devices=${#disks[@]} "${disks[@]}" >&2 || return 1
    fi
    echo "$array"
    ;;
  esac
}

use_instance_store() {
  local disk place
  if mountpoint -q "$store"; then
    return
  fi
  if ! disk=$(find_disk); then
    say "none, or no array of it; Docker stays on the root disk"
    return
  fi
  if [ -z "$(blkid -o value -s TYPE "$disk")" ] && ! mkfs.xfs -q "$disk"; then
    say "$disk cannot be formatted; Docker stays on the root disk"
    return
  fi
  mkdir -p "$store"
  if ! mount -o noatime "$disk" "$store"; then
    say "$disk cannot be mounted; Docker stays on the root disk"
    return
  fi
  for place in $kept; do
    if [ ! -d "$store/${place##*/}" ]; then
      mkdir -p "$place" "$store/${place##*/}"
      cp -a "$place/." "$store/${place##*/}/"
    fi
    mount --bind "$store/${place##*/}" "$place" || say "$place stays on the root disk"
  done
  say "$disk holds $kept"
}

use_instance_store
