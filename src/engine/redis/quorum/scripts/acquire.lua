-- One node's vote for a claim: takes every name for one attempt of an owner, or none of them.
--
-- KEYS    1 .. n         the lock keys
--         n+1 .. 2n      their fence companions
--         2n+1 .. 3n     their counters (names may share one)
--         3n+1 .. 4n     their metadata companions, only when there is metadata
-- ARGV    1  the owner's token
--         2  the number of the attempt: later ones have larger numbers
--         3  the ttl in ms
--         4  how long a fence companion lasts, in ms: longer than the lease
--         5  the floor of the fence: what the asker takes the nodes' clocks to show, in µs
--         6  the process id
--         7  the host
--         8  the metadata, only when there is some
-- Answer  granted: { 1, the fence that this node proposes, TIME in µs, 1 when it was the owner's already, else 0 }
--         busy:    { 0, the index of the first busy key, its PTTL, its value, for how many ms it has been held or -1 }
--
-- Everything is read (and can fail, as with a key of another type) before anything is written.

local owner, attempt, ttl, metadata = ARGV[1], ARGV[2], ARGV[3], ARGV[8]
local n = #KEYS / (metadata and 4 or 3)

-- Microseconds since 1970 stay below 2^53, and so exact in Lua's doubles, until the year 2255.
local time = redis.call('TIME')
local now = time[1] * 1000000 + time[2]

local ours, last, held = 0, 0, nil
for i = 1, n do
  local holder = redis.call('GET', KEYS[i])
  if holder then
    local token, number = string.match(holder, '^(%x+)%.(%d+)$')
    -- A request that was overtaken by a later attempt must not take the vote back from it.
    if token ~= owner or tonumber(number) > tonumber(attempt) then
      local record = redis.call('GET', KEYS[n + i])
      local since = record and token and string.match(record, '^%d+ ' .. token .. ' (%d+) ')
      -- A vote by plain commands has nothing told yet; attempts are numbered by the asker's clock, in µs.
      since = since or number and math.floor(tonumber(number) / 1000)
      local age = since and math.max(0, math.floor(now / 1000) - since) or -1
      return { 0, i, redis.call('PTTL', KEYS[i]), holder, age }
    end
    ours = ours + 1
    held = held or number
  end
  local count = redis.call('ZSCORE', KEYS[n + n + i], 'last')
  if count and tonumber(count) > last then
    last = tonumber(count)
  end
end

local fence, record, already
if ours == n then
  -- An earlier attempt of the same owner, whose answer may have been lost: the vote stays what it was. What is told is that
  -- vote's if it names its attempt: plain commands take a name and leave what was told before.
  local number, token, since, pid, told, host = string.match(
    redis.call('GET', KEYS[n + 1]) or '', '^(%d+) (%x+) (%d+) (%d+):(%d+) (.*)$')
  if token == owner and told == held and held ~= attempt then
    fence, already = tonumber(number), 1
    record = string.format('%s %s %s %s:%s %s', number, owner, since, pid, attempt, host)
  end
end
local counted
if not record then
  -- A common floor is why nodes agree at the first go. One that is not what this node's own clock shows is a request
  -- that was long on its way, or comes from somebody whose idea of the clocks is wrong: then this clock counts.
  fence = tonumber(ARGV[5])
  if math.abs(fence - now) > 100000 then
    fence = now
  end
  local since = math.floor(fence / 1000)
  if last >= fence then
    fence = last + 1
  end
  counted = string.format('%.0f', fence)
  record = string.format('%s %s %.0f %s:%s %s', counted, owner, since, ARGV[6], attempt, ARGV[7])
end

local kept = tonumber(ARGV[4]) - tonumber(ttl)
for i = 1, n do
  -- An attempt that is carried out late takes nothing away from a lease that lasts longer by now.
  local lasts = ours > 0 and math.max(tonumber(ttl), redis.call('PTTL', KEYS[i])) or tonumber(ttl)
  redis.call('SET', KEYS[i], owner .. '.' .. attempt, 'PX', string.format('%.0f', lasts))
  redis.call('SET', KEYS[n + i], record, 'PX', string.format('%.0f', kept + lasts))
  if counted then
    redis.call('ZADD', KEYS[n + n + i], 'GT', counted, 'last')
  end
  if metadata then
    redis.call('SET', KEYS[3 * n + i], owner .. ' ' .. metadata, 'PX', string.format('%.0f', lasts))
  end
end
return { 1, fence, now, already or 0 }
