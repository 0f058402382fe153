{{/* Names, labels and images that several templates use. */}}

{{- define "kvrouting.name" -}}
{{- default .Chart.Name .Values.nameOverride | trunc 50 | trimSuffix "-" -}}
{{- end -}}

{{- define "kvrouting.fullname" -}}
{{- if .Values.fullnameOverride -}}
{{- .Values.fullnameOverride | trunc 50 | trimSuffix "-" -}}
{{- else -}}
{{- $name := include "kvrouting.name" . -}}
{{- if contains $name .Release.Name -}}
{{- .Release.Name | trunc 50 | trimSuffix "-" -}}
{{- else -}}
{{- printf "%s-%s" .Release.Name $name | trunc 50 | trimSuffix "-" -}}
{{- end -}}
{{- end -}}
{{- end -}}

{{- define "kvrouting.operator" -}}
{{- printf "%s-operator" (include "kvrouting.fullname" .) -}}
{{- end -}}

{{/* Of the objects that need no namespace: two releases in two namespaces must not meet. */}}
{{- define "kvrouting.clusterName" -}}
{{- printf "%s-%s" .Release.Namespace (include "kvrouting.operator" .) -}}
{{- end -}}

{{- define "kvrouting.serviceAccount" -}}
{{- .Values.operator.serviceAccount.name | default (include "kvrouting.operator" .) -}}
{{- end -}}

{{- define "kvrouting.labels" -}}
app.kubernetes.io/name: {{ include "kvrouting.name" . }}
app.kubernetes.io/instance: {{ .Release.Name }}
app.kubernetes.io/version: {{ .Chart.AppVersion | quote }}
app.kubernetes.io/managed-by: {{ .Release.Service }}
helm.sh/chart: {{ printf "%s-%s" .Chart.Name .Chart.Version }}
{{- end -}}

{{- define "kvrouting.operatorSelector" -}}
app.kubernetes.io/name: {{ include "kvrouting.name" . }}
app.kubernetes.io/instance: {{ .Release.Name }}
app.kubernetes.io/component: operator
{{- end -}}

{{/* One of our images: list of the root and the key in .Values.images. */}}
{{- define "kvrouting.image" -}}
{{- $root := index . 0 -}}
{{- $images := $root.Values.images -}}
{{- $name := printf "%s:%s" (index $images (index . 1)) ($images.tag | default $root.Chart.AppVersion) -}}
{{- if $images.registry -}}
{{- printf "%s/%s" (trimSuffix "/" $images.registry) $name -}}
{{- else -}}
{{- $name -}}
{{- end -}}
{{- end -}}

{{- define "kvrouting.pullSecrets" -}}
{{- range .Values.images.pullSecrets }}
- name: {{ . }}
{{- end }}
{{- end -}}

{{/* The spec of a pool: list of the root, the pool's name and its values. */}}
{{- define "kvrouting.poolSpec" -}}
{{- $root := index . 0 -}}
{{- $name := index . 1 -}}
{{- $pool := index . 2 -}}
{{- $spec := dict -}}
{{- with $pool.preset -}}
{{- if not (hasKey $root.Values.presets .) -}}
{{- fail (printf "pools.%s.preset is %q; there are %s" $name . (keys $root.Values.presets | sortAlpha | join ", ")) -}}
{{- end -}}
{{- $spec = deepCopy (index $root.Values.presets .).spec -}}
{{- end -}}
{{- $spec = mergeOverwrite $spec (deepCopy ($pool.spec | default dict)) -}}
{{- if not (hasKey $spec "gpu") -}}
{{- fail (printf "pools.%s needs a preset or spec.gpu" $name) -}}
{{- end -}}
{{- if not (dig "model" "name" "" $spec) -}}
{{- fail (printf "pools.%s.spec.model.name is missing: the model's name on the hub" $name) -}}
{{- end -}}
{{- with $root.Values.images.pullSecrets -}}
{{- $pull := list -}}
{{- range . -}}{{- $pull = append $pull (dict "name" .) -}}{{- end -}}
{{- $pod := dict "podTemplate" (dict "spec" (dict "imagePullSecrets" $pull)) -}}
{{- $spec = merge $spec (deepCopy $pod) -}}
{{- $_ := set $spec "router" (merge ($spec.router | default dict) (deepCopy $pod)) -}}
{{- end -}}
{{- toYaml $spec -}}
{{- end -}}

{{/* Pod Security `restricted`. */}}
{{- define "kvrouting.podSecurity" -}}
runAsNonRoot: true
runAsUser: 65532
runAsGroup: 65532
seccompProfile:
  type: RuntimeDefault
{{- end -}}

{{- define "kvrouting.containerSecurity" -}}
allowPrivilegeEscalation: false
readOnlyRootFilesystem: true
capabilities:
  drop: [ALL]
{{- end -}}
