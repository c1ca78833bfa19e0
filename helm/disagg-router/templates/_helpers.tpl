{{- define "dr.fullname" -}}
{{- if .Values.fullnameOverride }}{{ .Values.fullnameOverride | trunc 40 | trimSuffix "-" }}
{{- else }}{{- $name := .Values.nameOverride | default .Chart.Name }}
{{- if contains $name .Release.Name }}{{ .Release.Name | trunc 40 | trimSuffix "-" }}
{{- else }}{{ printf "%s-%s" .Release.Name $name | trunc 40 | trimSuffix "-" }}{{ end }}{{ end }}
{{- end }}

{{/* What a selector may hold: it can never be changed afterwards. Takes (list . component). */}}
{{- define "dr.selector" -}}
{{- $root := index . 0 -}}
app.kubernetes.io/name: {{ $root.Values.nameOverride | default $root.Chart.Name }}
app.kubernetes.io/instance: {{ $root.Release.Name }}
app.kubernetes.io/component: {{ index . 1 }}
{{- end }}

{{- define "dr.labels" -}}
{{ include "dr.selector" . }}
{{- with index . 0 }}
app.kubernetes.io/version: {{ .Chart.AppVersion | quote }}
app.kubernetes.io/managed-by: {{ .Release.Service }}
helm.sh/chart: {{ .Chart.Name }}-{{ .Chart.Version }}
{{- with .Values.commonLabels }}
{{ toYaml . }}
{{- end }}
{{- end }}
{{- end }}

{{/* Takes (list . wholeReference variant). */}}
{{- define "dr.image" -}}
{{- $root := index . 0 }}{{ $image := $root.Values.image -}}
{{- if index . 1 }}{{ index . 1 }}
{{- else }}{{ with $image.registry }}{{ . }}/{{ end }}{{ $image.repository }}:{{ $image.tag | default $root.Chart.AppVersion }}-{{ index . 2 }}{{ end }}
{{- end }}

{{- define "dr.secret" -}}
{{ .Values.secrets.existing | default (include "dr.fullname" .) }}
{{- end }}

{{- define "dr.serviceAccount" -}}
{{ .Values.serviceAccount.name | default (.Values.serviceAccount.create | ternary (include "dr.fullname" .) "default") }}
{{- end }}

{{/* The roles whose engines the chart starts, as a JSON list. */}}
{{- define "dr.roles" -}}
{{- if eq .Values.mode "proxy" }}[]{{ else }}{{ keys (.Values.config.pools | default dict) | sortAlpha | toJson }}{{ end }}
{{- end }}

{{/* poolDefaults with the role's own keys over them, as JSON. Takes (list . role). */}}
{{- define "dr.pool" -}}
{{- $values := (index . 0).Values -}}
{{ mustMergeOverwrite (deepCopy $values.poolDefaults) (index $values.pools (index . 1) | default dict) | toJson }}
{{- end }}

{{/* Takes (list constraints selector). */}}
{{- define "dr.spread" -}}
{{- $labels := index . 1 | fromYaml -}}
{{- range index . 0 }}
{{ list (mergeOverwrite (dict "labelSelector" (dict "matchLabels" $labels)) .) | toYaml }}
{{- end }}
{{- end }}

{{/* What a pod's spec says about where it may run. Takes a router, head or pool. */}}
{{- define "dr.placement" -}}
{{- with .nodeSelector }}
nodeSelector:
  {{- toYaml . | nindent 2 }}
{{- end }}
{{- with .tolerations }}
tolerations:
  {{- toYaml . | nindent 2 }}
{{- end }}
{{- with .priorityClassName }}
priorityClassName: {{ . }}
{{- end }}
{{- end }}

{{- define "dr.pullSecrets" -}}
{{- with .Values.image.pullSecrets }}
imagePullSecrets:
  {{- toYaml . | nindent 2 }}
{{- end }}
{{- end }}

{{/* The volume with the models. Takes (list . cache), cache as in poolDefaults. */}}
{{- define "dr.cacheVolume" -}}
{{- $root := index . 0 }}{{ $cache := index . 1 -}}
- name: cache
{{- if $cache.claim }}
  persistentVolumeClaim: {claimName: {{ $cache.claim }}}
{{- else if $cache.hostPath }}
  hostPath: {path: {{ $cache.hostPath }}, type: Directory}
{{- else if $root.Values.cacheVolume.create }}
  persistentVolumeClaim: {claimName: {{ include "dr.fullname" $root }}-cache}
{{- else }}
  emptyDir: {sizeLimit: {{ $cache.sizeLimit }}}
{{- end }}
{{- end }}

{{/* Everything that writes does so here: the root file system is read-only. */}}
{{- define "dr.scratchVolumes" -}}
- {name: tmp, emptyDir: {}}
- {name: state, emptyDir: {}}
{{- end }}
{{- define "dr.scratchMounts" -}}
- {name: tmp, mountPath: /tmp}
- {name: state, mountPath: /var/lib/disagg-router}
{{- end }}

{{/* subPath: the cluster's identity is made from the file's real path, which in a plain ConfigMap mount changes with its content. */}}
{{- define "dr.configVolume" -}}
- {name: config, configMap: {name: {{ include "dr.fullname" . }}}}
{{- end }}
{{- define "dr.configMount" -}}
- {name: config, mountPath: /etc/disagg-router/cluster.yaml, subPath: cluster.yaml, readOnly: true}
{{- end }}

{{- define "dr.homeEnv" -}}
- {name: HOME, value: /tmp}
- {name: USER, value: disagg} # torch asks for it, and another image may have no name for the user
- {name: DISAGG_ROUTER_STATE_DIR, value: /var/lib/disagg-router}
- name: POD_IP
  valueFrom: {fieldRef: {fieldPath: status.podIP}}
{{- end }}

{{- define "dr.rayEnv" -}}
- {name: RAY_AUTH_MODE, value: token}
- name: RAY_AUTH_TOKEN
  valueFrom: {secretKeyRef: {name: {{ include "dr.secret" . }}, key: auth_token}}
- {name: RAY_USAGE_STATS_ENABLED, value: "0"}
- {name: RAY_worker_niceness, value: "0"}
{{- end }}

{{- define "dr.hfEnv" -}}
- name: HF_TOKEN
  valueFrom: {secretKeyRef: {name: {{ include "dr.secret" . }}, key: hf_token, optional: true}}
{{- end }}
