-- Takes every name for one owner, or none of them.
--
-- KEYS    1 .. n         the lock keys
--         n+1 .. 2n      their fence companions
--         2n+1 .. 3n     their metadata companions, only when there is metadata
-- ARGV    1  the owner's token
--         2  the ttl in ms
--         3  how long a fence companion lasts, in ms: longer than the lease, by a day
--         4  the process id
--         5  the host
--         6  the metadata, only when there is some
-- Answer  granted: the fence, an integer
--         busy:    { the index of the first busy key, its PTTL }
--
-- Everything is read (and can fail, as with a key of another type) before anything is written.

local owner, ttl, metadata = ARGV[1], ARGV[2], ARGV[6]
local n = #KEYS / (metadata and 3 or 2)

local ours = 0
for i = 1, n do
  local holder = redis.call('GET', KEYS[i])
  if holder == owner then
    ours = ours + 1
  elseif holder then
    return { i, redis.call('PTTL', KEYS[i]) }
  end
end

local fence, record
if ours == n then
  -- A retry after a lost reply: the grant that it did not hear of, with a full ttl.
  local last = redis.call('GET', KEYS[n + 1])
  local number, token = string.match(last or '', '^(%d+) (%x+) ')
  if token == owner then
    fence, record = tonumber(number), last
  end
end
if not record then
  -- Microseconds since 1970 stay below 2^53, and so exact in Lua's doubles, until the year 2255.
  local now = redis.call('TIME')
  fence = now[1] * 1000000 + now[2]
  for i = n + 1, n + n do
    local last = redis.call('GET', KEYS[i])
    local number = last and tonumber(string.match(last, '^%d+'))
    if number and number >= fence then
      fence = number + 1
    end
  end
  local ms = math.floor(now[2] / 1000)
  record = string.format('%.0f %s %s%03d %s %s', fence, owner, now[1], ms, ARGV[4], ARGV[5])
end

for i = 1, n do
  redis.call('SET', KEYS[i], owner, 'PX', ttl)
  redis.call('SET', KEYS[n + i], record, 'PX', ARGV[3])
  if metadata then
    redis.call('SET', KEYS[n + n + i], owner .. ' ' .. metadata, 'PX', ttl)
  end
end
return fence
