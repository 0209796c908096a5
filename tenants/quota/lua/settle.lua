-- Replaces a hold by what was used.
-- ARGV: now_us, epoch, spare, request id, then what was used by meter

if is_lost() then
  return {'lost'}
end
told = ARGV[3]
local hold = find_hold(ARGV[4])
if not hold then
  return {'gone'}
end
local actual = by_meter(5)
local too_much = overrun(hold, actual)
if too_much then
  return too_much
end
finish(ARGV[4], hold, actual)
return {'settled'}
