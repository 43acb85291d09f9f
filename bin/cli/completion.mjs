// `holdfast completion`: scripts for shells.

/**
 * Returns the completion script of each shell.
 *
 * @param {Record<string, string[]>} optionsOf the options of each command
 * @returns {Record<string, string>}
 */
export function completionScripts(optionsOf) {
  const names = Object.keys(optionsOf).join(' ')
  const cases = (/** @type {(options: string) => string} */ action) =>
    Object.entries(optionsOf)
      .map(([name, options]) => `    ${name}) ${action(options.join(' '))} ;;`)
      .join('\n')
  const bash = `_holdfast() {
  local words="${names} help" word="\${COMP_WORDS[COMP_CWORD]}"
  [ "$COMP_CWORD" -gt 1 ] && case "\${COMP_WORDS[1]}" in
${cases((options) => `words="${options}"`)}
    *) words="" ;;
  esac
  COMPREPLY=($(compgen -W "$words" -- "$word"))
}
complete -o default -F _holdfast holdfast`
  const zsh = `#compdef holdfast
_holdfast() {
  if (( CURRENT == 2 )); then
    compadd -- ${names} help
    return
  fi
  case "\${words[2]}" in
${cases((options) => `compadd -- ${options}`)}
  esac
  _files
}
# In a folder of $fpath, this file is the function itself.
if [[ "\${funcstack[1]}" = _holdfast ]]; then _holdfast "$@"; else compdef _holdfast holdfast; fi`
  return { bash, zsh }
}
