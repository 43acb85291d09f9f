// The plots of the report, as SVG for light and dark backgrounds: pairs by calls in flight on one Redis. Each contender has a line
// with its range, and its name at the end of the line.

const WIDTH = 860
const HEIGHT = 500
const AREA = { left: 64, right: 660, top: 64, bottom: 448 }
/** The distance between the bars of two contenders at the same load, so that they do not overlap. */
const ASIDE = 2.6
/** The minimum distance between the names at the right edge. */
const NAME_HEIGHT = 15

/** One hue per contender, dark enough for white and light enough for black; dashes where a contender has a second setting. */
const STYLES = {
  holdfast: { hue: ['#c92a2a', '#ff6b6b'], width: 3.5 },
  'holdfast-using': { hue: ['#c92a2a', '#ff6b6b'], dash: '6 4' },
  ioredis: { hue: ['#495057', '#ced4da'] },
  'ioredis-auto': { hue: ['#495057', '#ced4da'], dash: '6 4' },
  'node-redis': { hue: ['#0b7285', '#3bc9db'] },
  'valkey-glide': { hue: ['#5f3dc4', '#b197fc'] },
  'redis-semaphore': { hue: ['#1864ab', '#4dabf7'] },
  'redis-semaphore-auto': { hue: ['#1864ab', '#4dabf7'], dash: '6 4' },
  verrou: { hue: ['#2b8a3e', '#69db7c'] },
  'verrou-auto': { hue: ['#2b8a3e', '#69db7c'], dash: '6 4' },
  redlock: { hue: ['#a61e4d', '#f783ac'] },
  'redlock-auto': { hue: ['#a61e4d', '#f783ac'], dash: '6 4' },
  'redlock-universal': { hue: ['#b35900', '#ffc078'] },
  'redlock-universal-auto': { hue: ['#b35900', '#ffc078'], dash: '6 4' },
}

/** Plots the content of `results.json`. Returns files by name, none if the pairs were not measured. */
export function plots({ machine, rounds, ms, sections }) {
  const pairs = sections.pairs?.[0]
  if (!pairs) return {}
  const method = `${machine}; ${rounds} rounds of ${ms} ms: medians, bars from least to greatest`
  return {
    'results.svg': plot({
      title: `Acquire and release of a free name: pairs per second (${pairs.title.replace('Pairs, ', '')})`,
      method,
      field: 'perSecond',
      loads: pairs.loads,
    }),
    'results-loop.svg': plot({
      title: 'Time on the event loop per pair, µs',
      method,
      field: 'loopUs',
      loads: pairs.loads,
    }),
  }
}

function plot({ title, method, field, loads }) {
  const inFlight = Object.keys(loads).map(Number)
  // The report has the other calls of holdfast.
  const modules = Object.keys(loads[inFlight[0]]).filter((module) => !/^holdfast-(?!using)/.test(module))
  for (const module of modules) if (!STYLES[module]) throw new Error(`the plot has no colour for ${module}`)
  const all = Object.values(loads).flatMap((byModule) => Object.values(byModule).flatMap((figures) => figures[field]))
  const x = scale([inFlight[0], inFlight.at(-1)], [AREA.left + 20, AREA.right - 20])
  const ticks = ticksOver(Math.min(...all), Math.max(...all))
  const y = scale([ticks[0], ticks.at(-1)], [AREA.bottom, AREA.top])
  const grid = [
    ...ticks.map(
      (tick) =>
        line(AREA.left, y(tick), AREA.right, y(tick), 'grid') + text(AREA.left - 8, y(tick) + 4, short(tick), 'end'),
    ),
    ...inFlight.map(
      (load) =>
        line(x(load), AREA.bottom, x(load), AREA.bottom + 5, 'grid') + text(x(load), AREA.bottom + 20, load, 'middle'),
    ),
    text((AREA.left + AREA.right) / 2, AREA.bottom + 40, 'calls in flight, one process and one connection', 'middle'),
  ]
  const series = modules.map((module, i) => {
    const aside = (i - (modules.length - 1) / 2) * ASIDE
    return { module, points: inFlight.map((load) => [x(load) + aside, loads[load][module][field]]) }
  })
  // holdfast is drawn last, above the others.
  const lines = [...series.slice(1), series[0]].map(({ module, points }) => curve(module, points, y))
  const names = apart(
    series.map(({ module, points }) => {
      const [from, [, median]] = points[points.length - 1]
      return { module, from, at: y(median) }
    }),
  ).map(
    ({ module, from, at, y2 }) =>
      line(from, at, AREA.right + 14, y2, `thin ${module}`) +
      text(AREA.right + 18, y2 + 4, module, 'start', `name ${module}${module === 'holdfast' ? ' own' : ''}`),
  )
  return [
    `<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 ${WIDTH} ${HEIGHT}" width="${WIDTH}" height="${HEIGHT}" role="img" aria-label="${escape(title)}">`,
    `<style>${style()}</style>`,
    `<rect class="paper" width="${WIDTH}" height="${HEIGHT}"/>`,
    text(AREA.left, 26, title, 'start', 'title'),
    text(AREA.left, 46, method, 'start'),
    ...grid,
    ...lines,
    ...names,
    '</svg>',
    '',
  ].join('\n')
}

function curve(module, points, y) {
  const path = points.map(([at, [, mid]], i) => `${i === 0 ? 'M' : 'L'}${round(at)} ${round(y(mid))}`).join(' ')
  const marks = points.map(
    ([at, [low, mid, high]]) =>
      line(at, y(low), at, y(high), `range ${module}`) +
      `<circle class="dot ${module}" cx="${round(at)}" cy="${round(y(mid))}" r="2.6"/>`,
  )
  return `<path class="line ${module}" d="${path}"/>${marks.join('')}`
}

/** Moves overlapping names apart, as little as possible and in the same order. */
function apart(names) {
  const sorted = [...names].sort((one, other) => one.at - other.at)
  const groups = []
  for (const name of sorted) {
    groups.push([name])
    // A group is centred on its members. A group that overlaps the group above joins it.
    while (groups.length > 1 && top(groups.at(-1)) < top(groups.at(-2)) + groups.at(-2).length * NAME_HEIGHT) {
      const lower = groups.pop()
      groups.at(-1).push(...lower)
    }
  }
  return groups.flatMap((group) => group.map((name, i) => ({ ...name, y2: top(group) + i * NAME_HEIGHT })))
}

function top(group) {
  const middle = group.reduce((sum, { at }) => sum + at, 0) / group.length
  const height = (group.length - 1) * NAME_HEIGHT
  return Math.min(Math.max(middle - height / 2, AREA.top), AREA.bottom - height)
}

/** Lists 1, 2 and 5 times powers of ten, from the one below `least` to the one above `greatest`. */
function ticksOver(least, greatest) {
  const ticks = []
  for (let power = Math.floor(Math.log10(least)); power <= Math.ceil(Math.log10(greatest)); power++) {
    ticks.push(...[1, 2, 5].map((digit) => digit * 10 ** power))
  }
  const from = ticks.findLastIndex((tick) => tick <= least)
  return ticks.slice(from, ticks.findIndex((tick) => tick >= greatest) + 1)
}

/** Returns a logarithmic scale. */
function scale([least, greatest], [from, to]) {
  return (value) => from + ((to - from) * Math.log(value / least)) / Math.log(greatest / least)
}

const round = (value) => Number(value.toFixed(1))
const short = (value) => (value >= 1000 ? `${value / 1000} k` : String(Number(value.toPrecision(2))))
const escape = (value) => String(value).replace(/[&<>"]/g, (sign) => `&#${sign.charCodeAt(0)};`)
const line = (x1, y1, x2, y2, kind) =>
  `<line class="${kind}" x1="${round(x1)}" y1="${round(y1)}" x2="${round(x2)}" y2="${round(y2)}"/>`
const text = (x, y, value, anchor, kind = '') =>
  `<text class="${kind}" x="${round(x)}" y="${round(y)}" text-anchor="${anchor}">${escape(value)}</text>`

function style() {
  const styles = (dark) =>
    Object.entries(STYLES)
      .map(([module, { hue }]) => `.${module}{stroke:${hue[dark]};fill:${hue[dark]}}`)
      .join('')
  const shapes = Object.entries(STYLES).map(
    ([module, { width = 1.8, dash }]) =>
      `.line.${module}{stroke-width:${width}${dash ? `;stroke-dasharray:${dash}` : ''}}`,
  )
  return [
    'text{font:12px system-ui,sans-serif;fill:#495057;stroke:none}.title{font-size:15px;font-weight:600;fill:#212529}',
    '.paper{fill:#fff}.grid{stroke:#dee2e6}',
    styles(0),
    'path.line{fill:none}.range{stroke-width:2.4;stroke-opacity:.45}.thin{stroke-width:1;stroke-opacity:.6}.dot{stroke:none}',
    'text.name{stroke:none}.own{font-weight:700;font-size:14px}',
    ...shapes,
    `@media (prefers-color-scheme:dark){.paper{fill:#0d1117}text{fill:#adb5bd}.title{fill:#f1f3f5}.grid{stroke:#343a40}${styles(1)}}`,
  ].join('')
}
