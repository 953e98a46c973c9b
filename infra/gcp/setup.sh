#!/usr/bin/env bash
# Makes what bucketfeed needs on Google Cloud: a private bucket, and a service account that jobs run as.
# May be run again at any time: it makes what lacks and sets right what has changed.
#
#   PROJECT=my-project BUCKET=my-bucket infra/gcp/setup.sh
#
#   LOCATION     where the bucket lies, best where the machines are (us-central1)
#   ACCOUNT      name of the service account (bucketfeed)
#   KUBERNETES   namespace/name of a Kubernetes service account of this project's GKE clusters whose pods act as it
#   MEMBER       who may act as it without a key file: user:me@example.com, group:..., serviceAccount:...
#   RETRY_SECONDS  pause before a new account is tried again, which takes a while to be known everywhere (5)
set -euo pipefail

: "${PROJECT:?is not set: give the id of the Google Cloud project, as in PROJECT=my-project BUCKET=my-bucket $0}"
: "${BUCKET:?is not set: give the name of the bucket, as in PROJECT=my-project BUCKET=my-bucket $0}"
LOCATION=${LOCATION:-us-central1}
ACCOUNT=${ACCOUNT:-bucketfeed}
EMAIL="$ACCOUNT@$PROJECT.iam.gserviceaccount.com"
LIFECYCLE="$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)/lifecycle.json"

if [[ -n ${KUBERNETES:-} && ! $KUBERNETES =~ ^[a-z0-9-]+/[a-z0-9.-]+$ ]]; then
  echo "$0: KUBERNETES=$KUBERNETES is not namespace/name" >&2
  exit 2
fi

run() { gcloud --project="$PROJECT" --quiet "$@"; }

# What a binding prints is the whole policy of the bucket: nobody reads it.
bind() {
  local try
  for try in 1 2 3 4 5 6; do
    if run "$@" >/dev/null; then return; fi
    if ((try < 6)); then sleep "${RETRY_SECONDS:-5}"; fi
  done
  echo "$0: gcloud $* failed $try times; see above" >&2
  return 1
}

on_bucket() { # role, then a prefix of keys, or nothing for the whole bucket
  local condition=None
  if [[ -n ${2:-} ]]; then
    condition="^|^title=${2%/}|expression=resource.name.startsWith(\"projects/_/buckets/$BUCKET/objects/$2\")"
  fi
  bind storage buckets add-iam-policy-binding "gs://$BUCKET" \
    --member="serviceAccount:$EMAIL" --role="$1" --condition="$condition"
}

as_account() { # role, then who
  bind iam service-accounts add-iam-policy-binding "$EMAIL" --member="$2" --role="$1" --condition=None
}

run services enable storage.googleapis.com iam.googleapis.com iamcredentials.googleapis.com

# Conditions by prefix need uniform access; it also ends the ACLs that make objects public one by one.
if ! run storage buckets describe "gs://$BUCKET" >/dev/null 2>&1; then
  run storage buckets create "gs://$BUCKET" --location="$LOCATION" \
    --uniform-bucket-level-access --public-access-prevention
fi
run storage buckets update "gs://$BUCKET" \
  --uniform-bucket-level-access --public-access-prevention --lifecycle-file="$LIFECYCLE"

if ! run iam service-accounts describe "$EMAIL" >/dev/null 2>&1; then
  run iam service-accounts create "$ACCOUNT" --display-name="bucketfeed training"
fi

on_bucket roles/storage.objectViewer              # reads and lists everything
on_bucket roles/storage.objectCreator outputs/    # writes outputs, and replaces none
on_bucket roles/storage.objectUser checkpoints/   # writes checkpoints, and prunes them

if [[ -n ${KUBERNETES:-} ]]; then
  as_account roles/iam.workloadIdentityUser "serviceAccount:$PROJECT.svc.id.goog[$KUBERNETES]"
fi
if [[ -n ${MEMBER:-} ]]; then
  as_account roles/iam.serviceAccountTokenCreator "$MEMBER"
fi

echo "bucket           gs://$BUCKET"
echo "service account  $EMAIL"
if [[ -n ${KUBERNETES:-} ]]; then
  echo "in Kubernetes    kubectl annotate serviceaccount -n ${KUBERNETES%/*} ${KUBERNETES#*/}" \
    "iam.gke.io/gcp-service-account=$EMAIL"
fi
if [[ -n ${MEMBER:-} ]]; then
  echo "elsewhere        gcloud auth application-default login --impersonate-service-account=$EMAIL"
fi
