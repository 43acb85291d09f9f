-- The common case of acquire.lua, which it stands in front of: one name, free, nobody waits for it, no metadata. What the
-- rest of that script needs, the functions of the queue above all, is not even set up then.

local owner, ttl, kept, metadata = ARGV[1], ARGV[2], ARGV[3], ARGV[9]
-- The names, and the key of the last token of all, which only a server of its own has (acquire.lua says what else is where).
local n = math.floor(#KEYS / (metadata and 4 or 3))
local counter = KEYS[n * (metadata and 4 or 3) + 1]

if n == 1 and not metadata and redis.call('EXISTS', KEYS[3]) == 0 then
  -- Read, and so found to be of another type, before anything is written.
  local last = redis.call('GET', counter or KEYS[2])
  if redis.call('SET', KEYS[1], owner, 'PX', ttl, 'NX') then
    local now = redis.call('TIME')
    local micros = string.format('%06d', now[2])
    local fence, least = now[1] .. micros, ARGV[8]
    if last or least then
      local known = last and tonumber(string.match(last, '^%d+')) or 0
      least = math.max(known + 1, tonumber(least or 0))
      if least > tonumber(fence) then
        fence = string.format('%.0f', least)
      end
    end
    local since = now[1] .. string.sub(micros, 1, 3)
    redis.call('SET', KEYS[2], fence .. ' ' .. owner .. ' ' .. since .. ' ' .. ARGV[4], 'PX', kept)
    if counter then
      redis.call('SET', counter, fence)
    end
    return tonumber(fence)
  end
end

