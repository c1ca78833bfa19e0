{{/* The labels that a pool's pods carry and are selected by. Takes (list . role). */}}
{{- define "dr.poolSelector" -}}
{{ include "dr.selector" (list (index . 0) "engine") }}
disagg-router/pool: {{ index . 1 }}
{{- end }}

{{/* Limits and requests of a pool's container. Takes (list pool gpus). */}}
{{- define "dr.poolResources" -}}
{{- $pool := index . 0 }}{{ $gpus := index . 1 | int64 -}}
{{- $devices := dict -}}
{{- if $gpus }}{{ $_ := set $devices $pool.gpuResource ($gpus | toString) }}{{ end -}}
{{- if $pool.rdmaResource }}{{ $_ := set $devices $pool.rdmaResource ($pool.rdmaCount | int64 | toString) }}{{ end -}}
{{ mustMergeOverwrite (dict "limits" $devices "requests" (deepCopy $devices)) $pool.resources | toYaml }}
{{- end }}

{{/* The pod of one engine instance: a Ray node with room for just that one. Takes (list . role). */}}
{{- define "dr.enginePod" -}}
{{- $root := index . 0 }}{{ $role := index . 1 -}}
{{- $pool := include "dr.pool" . | fromJson -}}
{{- $wanted := index $root.Values.config.pools $role -}}
{{- $security := deepCopy $pool.securityContext -}}
{{- if $pool.rdmaResource }}
{{- $capabilities := $security.capabilities | default dict }}
{{- $_ := set $security "capabilities" (mergeOverwrite (deepCopy $capabilities) (dict "add" (append ($capabilities.add | default list) "IPC_LOCK" | uniq))) }}
{{- end -}}
metadata:
  labels:
    {{- include "dr.labels" (list $root "engine") | nindent 4 }}
    disagg-router/pool: {{ $role }}
    {{- with $pool.podLabels }}
    {{- toYaml . | nindent 4 }}
    {{- end }}
  {{- with $pool.podAnnotations }}
  annotations:
    {{- toYaml . | nindent 4 }}
  {{- end }}
spec:
  serviceAccountName: {{ include "dr.serviceAccount" $root }}
  automountServiceAccountToken: false
  enableServiceLinks: false
  {{- if $pool.hostNetwork }}
  hostNetwork: true
  dnsPolicy: ClusterFirstWithHostNet
  {{- end }}
  {{- if $pool.hostIPC }}
  hostIPC: true
  {{- end }}
  terminationGracePeriodSeconds: {{ $pool.terminationGracePeriodSeconds | int64 }}
  securityContext:
    {{- toYaml $pool.podSecurityContext | nindent 4 }}
  {{- include "dr.pullSecrets" $root | nindent 2 }}
  {{- include "dr.placement" $pool | nindent 2 }}
  {{- with $pool.affinity }}
  affinity:
    {{- toYaml . | nindent 4 }}
  {{- end }}
  {{- with $pool.topologySpreadConstraints }}
  topologySpreadConstraints:
    {{- include "dr.spread" (list . (include "dr.poolSelector" (list $root $role))) | nindent 4 }}
  {{- end }}
  {{- with $pool.runtimeClassName }}
  runtimeClassName: {{ . }}
  {{- end }}
  {{- with $pool.schedulerName }}
  schedulerName: {{ . }}
  {{- end }}
  {{- with $pool.extraPodSpec }}
  {{- toYaml . | nindent 2 }}
  {{- end }}
  containers:
    - name: engine
      image: {{ include "dr.image" (list $root $pool.image $root.Values.config.engine.device) | quote }}
      imagePullPolicy: {{ $root.Values.image.pullPolicy }}
      args:
        - ray
        - start
        - --block
        - --address={{ include "dr.fullname" $root }}-head:6379
        - --node-ip-address=$(POD_IP)
        - --num-cpus=1
        - --num-gpus={{ $wanted.gpus | default 0 | int64 }}
        - --object-store-memory=100000000
        - --metrics-export-port=8080
        - --dashboard-agent-listen-port=52365
        {{- with $wanted.labels }}
        - --labels={{ range $i, $key := keys . | sortAlpha }}{{ if $i }},{{ end }}{{ $key }}={{ get $wanted.labels $key }}{{ end }}
        {{- end }}
        {{- with $pool.extraRayArgs }}
        {{- toYaml . | nindent 8 }}
        {{- end }}
      env:
        {{- include "dr.homeEnv" $root | nindent 8 }}
        {{- include "dr.rayEnv" $root | nindent 8 }}
        {{- include "dr.hfEnv" $root | nindent 8 }}
        - {name: HF_HOME, value: {{ $pool.cache.mountPath }}/huggingface}
        - {name: XDG_CACHE_HOME, value: {{ $pool.cache.mountPath }}/compiled}
        {{- with $pool.extraEnv }}
        {{- toYaml . | nindent 8 }}
        {{- end }}
      {{- with $pool.extraEnvFrom }}
      envFrom:
        {{- toYaml . | nindent 8 }}
      {{- end }}
      ports:
        - {name: node-agent, containerPort: 52365}
        - {name: metrics, containerPort: 8080}
      {{- if $pool.preStopSeconds }}
      lifecycle:
        preStop: {exec: {command: [sleep, {{ $pool.preStopSeconds | int64 | quote }}]}}
      {{- end }}
      startupProbe:
        httpGet: {path: /api/local_raylet_healthz, port: node-agent}
        {{- toYaml $pool.startupProbe | nindent 8 }}
      livenessProbe:
        httpGet: {path: /api/local_raylet_healthz, port: node-agent}
        {{- toYaml $pool.livenessProbe | nindent 8 }}
      readinessProbe:
        httpGet: {path: /api/local_raylet_healthz, port: node-agent}
        {{- toYaml $pool.readinessProbe | nindent 8 }}
      resources:
        {{- include "dr.poolResources" (list $pool ($wanted.gpus | default 0)) | nindent 8 }}
      securityContext:
        {{- toYaml $security | nindent 8 }}
      volumeMounts:
        {{- include "dr.scratchMounts" $root | nindent 8 }}
        - {name: shm, mountPath: /dev/shm}
        - {name: cache, mountPath: {{ $pool.cache.mountPath }}}
        {{- with $pool.extraVolumeMounts }}
        {{- toYaml . | nindent 8 }}
        {{- end }}
  volumes:
    {{- include "dr.scratchVolumes" $root | nindent 4 }}
    - {name: shm, emptyDir: {medium: Memory, sizeLimit: {{ $pool.shmSize }}}}
    {{- include "dr.cacheVolume" (list $root $pool.cache) | nindent 4 }}
    {{- with $pool.extraVolumes }}
    {{- toYaml . | nindent 4 }}
    {{- end }}
{{- end }}
